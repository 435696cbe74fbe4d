"""Server-sent events of a streamed completion.

Everything that does not change is encoded once for each request; a delta costs one escape and one join.
Usage rides in the final chunk; with `stream_options.include_usage` OpenAI's extra chunk follows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from contract.messages import Delta, JobFinished, PromptScored
from gateway.dispatch.generation import Reply
from gateway.errors import ApiError
from gateway.stream.completion import Completion, LogprobLists, Usage
from gateway.stream.failures import to_api_error

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"

_json = msgspec.json.Encoder().encode


def error_event(error: ApiError) -> bytes:
    """Return the event that tells a client of a failure after its 200, and the end of the stream."""
    return b"data: " + error.content() + b"\n\n" + DONE


@dataclass(slots=True)
class _ChoiceState:
    prefix: str = ""
    """Text still to be put before the next delta: the echoed prompt."""
    prefix_logprobs: LogprobLists | None = None


class ChunkRenderer:
    """Turns the replies of one request into bytes to be sent."""

    def __init__(self, completion: Completion) -> None:
        self._completion = completion
        self._with_logprobs = completion.request.logprobs is not None
        self.usage = Usage()
        self.failure: ApiError | None = None
        """Why the stream cannot go on."""
        self._unfinished_jobs = len(completion.request.prompts)
        self._unfinished_choices = completion.choices
        self._final_delta: tuple[int, int, Delta] | None = None
        self._echoes: dict[int, _ChoiceState] = {}
        if completion.request.echo:
            self._echoes = {
                index: _ChoiceState(prefix=completion.prompt_texts[index // completion.request.n])
                for index in range(completion.choices)
            }
        head = _json(
            {
                "id": completion.id,
                "object": "text_completion",
                "created": completion.created,
                "model": completion.model,
                "system_fingerprint": completion.fingerprint,
            }
        )
        self._head = b"data: " + head[:-1]
        self._choice_heads = [
            self._head + b',"choices":[{"index":%d,"text":' % index
            for index in range(completion.choices)
        ]
        # OpenAI puts `usage: null` into every other chunk when the extra one was asked for.
        self._tail = b',"usage":null}\n\n' if completion.request.include_usage else b"}\n\n"
        self._plain_end = b',"logprobs":null,"finish_reason":null}]' + self._tail

    @property
    def finished(self) -> bool:
        """Whether everything has been rendered, `[DONE]` included."""
        return self._unfinished_jobs == 0

    def render(self, replies: Sequence[Reply]) -> bytes:
        """Return the events for some replies, possibly none. Stops at a failed job: see `failure`."""
        parts: list[bytes] = []
        for prompt_index, message in replies:
            if isinstance(message, Delta):
                self._add_delta(prompt_index, message, parts)
            elif isinstance(message, JobFinished):
                self._finish_job(message, parts)
            elif isinstance(message, PromptScored):
                self._add_prompt_logprobs(prompt_index, message)
            else:
                self.failure = to_api_error(message)
                break
        return b"".join(parts)

    def _add_delta(self, prompt_index: int, delta: Delta, parts: list[bytes]) -> None:
        index = prompt_index * self._completion.request.n + delta.choice
        if delta.finish_reason is None and not self._with_logprobs and not self._echoes:
            if delta.text:
                parts += (self._choice_heads[index], _json(delta.text), self._plain_end)
            return
        if delta.finish_reason is not None:
            self._unfinished_choices -= 1
            if self._unfinished_choices == 0:
                self._final_delta = (index, prompt_index, delta)  # Waits for the usage.
                return
        parts.append(self._chunk(index, prompt_index, delta, self._tail))

    def _finish_job(self, finished: JobFinished, parts: list[bytes]) -> None:
        self.usage.add(finished)
        self._unfinished_jobs -= 1
        if self._unfinished_jobs:
            return
        usage = b',"usage":' + _json(self.usage.body()) + b"}\n\n"
        if self._final_delta is not None:
            parts.append(self._chunk(*self._final_delta, usage))
        if self._completion.request.include_usage:
            parts += (self._head, b',"choices":[]', usage)
        parts.append(DONE)

    def _chunk(self, index: int, prompt_index: int, delta: Delta, tail: bytes) -> bytes:
        text, logprobs = delta.text, self._logprobs(index, prompt_index, delta)
        echo = self._echoes.pop(index, None)
        if echo is not None:
            text = echo.prefix + text
        if not text and not delta.finish_reason and not logprobs:
            return b""
        parts = [
            self._choice_heads[index],
            _json(text),
            b',"logprobs":',
            _json(None if logprobs is None else logprobs.body()),
            b',"finish_reason":',
            _json(delta.finish_reason),
        ]
        if delta.stop_reason is not None:
            parts += (b',"stop_reason":', _json(delta.stop_reason))
        return b"".join((*parts, b"}]", tail))

    def _logprobs(self, index: int, prompt_index: int, delta: Delta) -> LogprobLists | None:
        if not self._with_logprobs:
            return None
        echo = self._echoes.get(index)
        lists = (
            echo.prefix_logprobs if echo is not None and echo.prefix_logprobs else LogprobLists()
        )
        lists.extend(delta.logprobs or [], base=len(self._completion.prompt_texts[prompt_index]))
        return lists if lists.tokens else None

    def _add_prompt_logprobs(self, prompt_index: int, scored: PromptScored) -> None:
        for choice in range(self._completion.request.n):
            lists = LogprobLists()
            lists.extend_with_prompt(scored.logprobs, self._completion.prompt_texts[prompt_index])
            index = self._completion.choice_index(prompt_index, choice)
            self._echoes[index].prefix_logprobs = lists
