"""Server-sent events of a streamed completion or chat.

Everything that does not change is encoded once per request. A delta that adds only text costs one
escape and one join. Usage is in the final chunk, or in OpenAI's extra chunk if that was requested.

`data` comes before `id` (see `gateway.completions.rendering.events`), because llama.cpp's own
client loses the line after a line that it ignores.
"""

import secrets
from typing import Any, ClassVar

import msgspec
from typing_extensions import override

from contract.messages import Delta, JobFinished, JobStarted, PromptScored
from gateway.completions.rendering.choice import Choice
from gateway.completions.rendering.completion import Completion
from gateway.completions.rendering.events import EVENT_END, EventRenderer
from gateway.completions.rendering.kinds import choice_type
from gateway.completions.rendering.timings import (
    RunningTimings,
    prompt_progress,
    shown_timings,
)
from gateway.dialects.request import GenerationRequest
from gateway.records.errors import ApiError, ErrorStyle

DONE = b"data: [DONE]"
BEGINNING = b"data: {"
"""How every event but `[DONE]` begins. The first keep-alive of a silence sends it in advance."""
KEEP_ALIVE = b" "
"""Sent in silence after BEGINNING: white space in the JSON of the next event.

Some clients parse each empty line as an event, and some load generators each other line.
"""
BLOCK_BYTES = 128
"""Obfuscated chunks are padded to a multiple of this length."""

_END = b"}"
_OBFUSCATION = b',"obfuscation":""'

_json = msgspec.json.Encoder().encode


def error_data(error: ApiError, style: ErrorStyle = ErrorStyle.OPENAI, **members: Any) -> bytes:
    """Return the `data` line of an error after status 200, with `members` beside `error`."""
    return b"data: " + _json({**error.body(style), **members})


class ChunkRenderer(EventRenderer):
    """Renders the chunks of completions and chats."""

    LAST_EVENTS: ClassVar[tuple[bytes, ...]] = (DONE,)
    """The events after everything else, of a failed stream too."""

    def __init__(self, completion: Completion, *, skip: int = 0, has_ids: bool = False) -> None:
        super().__init__(completion, skip=skip, has_ids=has_ids)
        request = completion.request
        self._running = RunningTimings(completion) if request.timings_per_token else None
        self._final_delta: tuple[int, Delta] | None = None
        self._finished_choices: set[int] = set()
        self._choices: dict[int, Choice] = {}
        """Created on demand: most choices of completions need it only for their last delta."""
        self._choice_type = choice_type(request)
        self._tokens: list[int] = []
        """Completion tokens of each choice, if every chunk with a choice has usage."""
        if request.continuous_usage and not request.hides_usage:
            self._tokens = [0] * completion.choices
        # OpenAI sends `usage: null` in every other chunk if the extra one was requested.
        self._common: dict[str, Any] = {"usage": None} if request.include_usage else {}
        self._head = self._encoded_head()
        self._is_chat = request.chat is not None
        self._may_be_plain = _may_be_plain(request)
        self._plain_heads: list[bytes] = [b""] * completion.choices
        """For each choice, the bytes before the text of its next delta, if that has only text.

        Empty if that delta cannot be rendered as plain text.
        """
        self._reasoning_heads: list[list[bytes]] = [[] for _ in range(completion.choices)]
        """For each choice, the bytes before each copy of its reasoning."""
        if not self._is_chat and not request.echo and request.prompt_logprobs is None:
            for index in range(completion.choices):
                self._become_plain(index)
        usage = b',"usage":null' if request.include_usage else b""
        event_end = self._id or EVENT_END
        self._plain_end = self._choice_type.PLAIN_END + b"]" + usage + _END + event_end

    @override
    def render_plain(self, prompt_index: int, delta: Delta) -> bytes | None:
        index = prompt_index * self._n + delta.choice
        head, text = self._plain_heads[index], delta.text
        if delta.finish_reason is not None or not head:
            return None
        if self._is_chat and (delta.reasoning_tokens or delta.reasoning or delta.calls):
            heads, text = self._reasoning_heads[index], delta.reasoning
            if not (heads and text) or delta.text or delta.calls:
                return None
            self.usage.add_reasoning(delta)
            head = _json(text).join(heads)
        self._received[prompt_index] += len(delta.token_ids)
        if not text:
            return b""
        self.number += 1
        if self.number <= self._skip:
            return b""
        event = b"".join((head, _json(text), self._plain_end))
        return b"%b%d\n\n" % (event, self.number) if self._id else event

    @override
    def _failure_events(self, error: ApiError) -> list[bytes]:
        """Return the error's event and LAST_EVENTS.

        `usage` counts the tokens that were sent before: in OpenAI's extra chunk if that was
        requested, else beside the error. Clients that declined usage get none. Fireworks clients
        also get a finish reason for every open choice.
        """
        request = self._completion.request
        events: list[bytes] = []
        members: dict[str, Any] = {}
        so_far = self.usage_so_far()
        if so_far.completion_tokens and request.include_usage:
            events.append(self._chunk([], {"usage": so_far.body()}))
        elif so_far.completion_tokens and not request.hides_usage:
            members["usage"] = so_far.body()
        if request.profile.ends_choices_with_error:
            members["choices"] = [
                self._choice(index).failed()
                for index in range(self._completion.choices)
                if index not in self._finished_choices
            ]
        events += (error_data(error, request.profile.error_style, **members), *self.LAST_EVENTS)
        return events

    def _encoded_head(self) -> bytes:
        return b"data: " + _json(self._completion.head(is_chunk=True))[:-1] + b","

    @override
    def _change_head(self) -> None:
        before, self._head = self._head, self._encoded_head()
        for heads in (self._plain_heads, *self._reasoning_heads):
            heads[:] = [each.replace(before, self._head, 1) for each in heads]

    @override
    def _take_scores(self, prompt_index: int, scored: PromptScored) -> None:
        encoded = self.prompt_logprobs.encode(prompt_index, scored)
        for index in range(prompt_index * self._n, (prompt_index + 1) * self._n):
            self._choice(index).take_prompt_logprobs(encoded)

    @override
    def _add_progress(self, prompt_index: int, started: JobStarted, parts: list[bytes]) -> None:
        """Add the events of a processed prompt: its cached part, then all of it."""
        if not self._completion.request.reports_progress:
            return
        for progress in prompt_progress(started, self._stopwatch.elapsed_ms()):
            choice = self._choice(prompt_index * self._n)
            members = {**self._common, "prompt_progress": progress}
            self._add_event(self._chunk([choice.without_tokens()], members), parts)
            if self._is_chat:
                # The chunk has sent the role.
                self._become_plain(prompt_index * self._n)

    @override
    def _add_delta(self, index: int, delta: Delta, parts: list[bytes]) -> None:
        if self._tokens:
            self._tokens[index] += len(delta.token_ids)
        if self._is_chat:
            self.usage.add_reasoning(delta)
        if delta.finish_reason is not None:
            if len(self._finished_choices) == self._completion.choices - 1:
                self._final_delta = (index, delta)  # Waits for the usage.
                return
            self._finished_choices.add(index)
        timings: dict[str, Any] = {}
        if self._running is not None:
            timings = {"timings": self._running.add(len(delta.token_ids))}
        for chunk in self._choice(index).chunks(delta):
            self._add_choice(index, chunk, timings, parts)
            # The first chunk has sent the echo, or the role.
            self._become_plain(index)

    def _become_plain(self, index: int) -> None:
        """Render the next deltas of a choice as plain text, if the request allows it."""
        if self._may_be_plain and not self._plain_heads[index]:
            start = self._head + b'"choices":[{"index":%d' % index
            self._plain_heads[index] = start + self._choice_type.PLAIN_START
            heads = self._choice_type.plain_reasoning_starts(self._completion.request)
            self._reasoning_heads[index] = [start + heads[0], *heads[1:]] if heads else []

    def _add_choice(
        self, index: int, chunk: dict[str, Any], timings: dict[str, Any], parts: list[bytes]
    ) -> None:
        """Add the event of a choice object before the final one.

        The event of a chat's role precedes the tokens: it counts none, and has no timings.
        """
        is_role = self._is_chat and "role" in chunk["delta"]
        members = self._choice(index).take_members() | self._usage_member(index, is_role=is_role)
        self._add_event(self._chunk([chunk], members if is_role else members | timings), parts)

    def _usage_member(self, index: int, *, is_role: bool = False) -> dict[str, Any]:
        """Return the `usage` of a chunk with a choice before the end of the response."""
        if not self._tokens:
            return self._common
        prompt_tokens = len(self._completion.prompt_token_ids[index // self._n])
        completion_tokens = 0 if is_role else self._tokens[index]
        counts = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        }
        return {"usage": counts}

    @override
    def _finish(self, parts: list[bytes]) -> None:
        request = self._completion.request
        timings = shown_timings(self._stopwatch, self.usage, request)
        body = self.usage.body() | timings.in_usage
        usage = {"usage": body | self._completion.cost(self.usage)}
        members = timings.beside_usage
        if self._final_delta is not None:
            index, delta = self._final_delta
            choice = self._choice(index)
            *others, last = choice.chunks(delta)
            running = {"timings": members["timings"]} if request.timings_per_token else {}
            for chunk in others:
                self._add_choice(index, chunk, running, parts)
            has_usage = not request.include_usage or request.profile.keeps_usage_in_final_chunk
            own = usage if has_usage and not request.hides_usage else self._usage_member(index)
            self._add_event(self._chunk([last], choice.take_members() | own | members), parts)
        if request.include_usage:
            self._add_event(self._chunk([], usage | members), parts)
        for event in self.LAST_EVENTS:
            self._add_event(event, parts)

    def _choice(self, index: int) -> Choice:
        choice = self._choices.get(index)
        if choice is None:
            choice = self._choices[index] = self._choice_type(self._completion, index)
        return choice

    def _chunk(self, choices: list[dict[str, Any]], members: dict[str, Any]) -> bytes:
        chunk = self._head + _json({"choices": choices, **members})[1:-1]
        if self._completion.request.include_obfuscation:
            chunk += _obfuscation(len(chunk) + len(_END) + len(EVENT_END))
        return chunk + _END


def _may_be_plain(request: GenerationRequest) -> bool:
    return not (
        request.logprobs is not None
        or request.return_token_ids
        or request.include_obfuscation
        or request.timings_per_token
        or request.is_native
        or request.continuous_usage
        # A completion's text is searched for tool calls at its end.
        or (request.tool_use is not None and request.chat is None)
    )


def _obfuscation(chunk_bytes: int) -> bytes:
    """Return the member that pads a chunk of `chunk_bytes` to a multiple of BLOCK_BYTES.

    Encryption hides the content of a chunk but not its length, which can reveal the text.
    """
    missing = -(chunk_bytes + len(_OBFUSCATION)) % BLOCK_BYTES
    # Random, because a compressing proxy would undo any other padding.
    return _OBFUSCATION[:-1] + secrets.token_hex(missing // 2 + 1)[:missing].encode() + b'"'


class NativeRenderer(ChunkRenderer):
    """Renders llama.cpp's own results of each choice; the last one as soon as its job finished."""

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
