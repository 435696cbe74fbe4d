"""Server-sent events of llama.cpp's own completions, and the choice between them and OpenAI's."""

from typing import Any, ClassVar

import msgspec
from typing_extensions import override

from contract.messages import Delta, JobFinished
from gateway.stream.completion import Completion
from gateway.stream.sse import ChunkRenderer

_json = msgspec.json.Encoder().encode


def event_renderer(
    completion: Completion, *, skip: int = 0, has_ids: bool = False
) -> ChunkRenderer:
    """Return a renderer for the form of a completion's response."""
    renderer = NativeRenderer if completion.request.is_native else ChunkRenderer
    return renderer(completion, skip=skip, has_ids=has_ids)


class NativeRenderer(ChunkRenderer):
    """Renders the results of each choice; the final one as soon as its job has finished."""

    LAST_EVENTS: ClassVar[tuple[bytes, ...]] = ()

    @override
    def _add_delta(self, index: int, delta: Delta, parts: list[bytes]) -> None:
        members: dict[str, Any] = {}
        if self._running is not None:
            members["timings"] = self._running.add(len(delta.token_ids))
        for chunk in self._choice(index).chunks(delta):
            self._add_event(self._chunk([chunk], members), parts)

    @override
    def _finish_job(self, prompt_index: int, finished: JobFinished, parts: list[bytes]) -> None:
        for index in range(prompt_index * self._n, (prompt_index + 1) * self._n):
            choice = self._choice(index)
            choice.take_finished(finished)
            self._add_event(self._chunk([choice.whole()], {}), parts)
        super()._finish_job(prompt_index, finished, parts)

    @override
    def _finish(self, parts: list[bytes]) -> None:
        """Add nothing: the results of the last job are the end."""

    @override
    def _chunk(self, choices: list[dict[str, Any]], members: dict[str, Any]) -> bytes:
        [result] = choices
        return b"data: " + _json(result | members)
