"""Renderers of events: what the streams of every API have in common.

Each event has a line `data`, and on request a line `id`: many clients accept one line only. An id
consists of the request's id and the number of the event, counted from 1. Numbers depend only on the
replies and their order, not on how many arrive at a time. So any gateway that has the replies can
resume after an event.
"""

from collections.abc import Sequence
from typing import ClassVar

import msgspec
from typing_extensions import override

from contract.messages import Delta, JobFailed, JobFinished, JobStarted, PromptScored
from contract.outcomes import FailureCode
from gateway.completions.queue.generation import Reply
from gateway.completions.rendering.completion import Completion, Usage
from gateway.completions.rendering.content_parts import Change, Part, PartStream
from gateway.completions.rendering.failures import to_api_error
from gateway.completions.rendering.prompt_logprobs import PromptLogprobs
from gateway.completions.rendering.timings import Stopwatch
from gateway.records.errors import ApiError

EVENT_END = b"\n\n"
_ONLY_HERE = {FailureCode.TAKEN_OVER, FailureCode.GATEWAY_STOPPING}
"""Failures of one connection to a response that continues on another gateway."""


class EventRenderer:
    """Renders the replies of one request as bytes to be sent.

    The first `skip` events, which the client already has, are counted but left out.
    """

    OPENS_AT_ONCE: ClassVar[bool] = False
    """Whether the stream begins with events that need no reply."""

    def __init__(self, completion: Completion, *, skip: int = 0, has_ids: bool = False) -> None:
        self._completion = completion
        self._n = completion.request.n
        self._skip = skip
        self.number = 0
        """Number of the last event."""
        self._id = b"\nid: %s:" % completion.id.encode() if has_ids else b""
        self.usage = completion.new_usage()
        self.whole = b""
        """The whole response after its last event, in a form whose last event has it."""
        self.failure: ApiError | None = None
        """The error that ended the stream."""
        self._is_failed = False
        """Whether the response itself has failed, and not only this connection to it."""
        self._stopwatch = Stopwatch(completion.started_at)
        self.prompt_logprobs = PromptLogprobs(completion)
        self._unfinished_jobs = len(completion.request.prompts)
        self._started: set[int] = set()
        """Prompts of which the start was rendered."""
        self._received = [0] * len(completion.request.prompts)
        """Completion tokens of each prompt whose job has not finished."""

    @property
    def finished(self) -> bool:
        """Whether everything has been rendered, the last event included."""
        return self._unfinished_jobs == 0

    def opening(self) -> bytes:
        """Return the events that need no reply, if there are any and they were not rendered yet."""
        return b""

    def keep_alive(self) -> bytes | None:
        """Return an event to send in silence, which has no number; None if no event is suitable.

        Without one, the beginning of the next event is sent in advance.
        """
        return None

    def render(self, replies: Sequence[Reply]) -> bytes:
        """Return the events for some replies, possibly none. Stops at a failure: see `failure`."""
        parts: list[bytes] = []
        try:
            for prompt_index, message in replies:
                if not isinstance(message, Delta):
                    self._add_message(prompt_index, message, parts)
                elif (event := self.render_plain(prompt_index, message)) is not None:
                    parts.append(event)
                else:
                    self._received[prompt_index] += len(message.token_ids)
                    self._add_delta(prompt_index * self._n + message.choice, message, parts)
        except ApiError as error:
            self.failure = error
        return b"".join(parts)

    def render_plain(self, prompt_index: int, delta: Delta) -> bytes | None:
        """Return the event of a delta that adds only text of one kind, and ends no choice.

        The event is empty if the delta has no text, or the client already has the event. Returns
        None, changing nothing, for any other delta.
        """
        del prompt_index, delta
        return None

    def render_failure(self, error: ApiError) -> bytes:
        """Return the events that end a failed stream.

        If the response itself has not failed, these events repeat the number of the last event
        before them, so that a client resumes after that event.
        """
        parts: list[bytes] = []
        last_number = max(self.number, self._skip)
        for event in self._failure_events(error):
            if self._is_failed:
                self._add_event(event, parts)
            else:
                parts += (event, self._event_end(last_number))
        return b"".join(parts)

    def usage_so_far(self) -> Usage:
        """Return the usage known before the end.

        A job that has not finished counts with the tokens that arrived. Its cached tokens and image
        tokens are unknown.
        """
        running = [index for index, tokens in enumerate(self._received) if tokens]
        prompt_tokens = sum(len(self._completion.prompt_token_ids[index]) for index in running)
        return msgspec.structs.replace(
            self.usage,
            prompt_tokens=self.usage.prompt_tokens + prompt_tokens,
            completion_tokens=self.usage.completion_tokens + sum(self._received),
        )

    def _failure_events(self, error: ApiError) -> list[bytes]:
        """Return the events that end a failed stream, without their ends."""
        raise NotImplementedError

    def _add_delta(self, index: int, delta: Delta, parts: list[bytes]) -> None:
        """Add the events of a choice's delta."""
        raise NotImplementedError

    def _finish(self, parts: list[bytes]) -> None:
        """Add the events after the last job's end."""
        raise NotImplementedError

    def _change_head(self) -> None:
        """Render the next events with the completion's new head, in a form that shows it."""

    def _take_scores(self, prompt_index: int, scored: PromptScored) -> None:
        """Store the log-probabilities of a prompt, in a form that shows them."""

    def _add_progress(self, prompt_index: int, started: JobStarted, parts: list[bytes]) -> None:
        """Add the events of a processed prompt, in a form that has some."""

    def _add_message(
        self,
        prompt_index: int,
        message: JobFinished | PromptScored | JobFailed | JobStarted,
        parts: list[bytes],
    ) -> None:
        if isinstance(message, JobFinished):
            self._finish_job(prompt_index, message, parts)
        elif isinstance(message, JobStarted):
            if self._completion.note_class(message):
                self._change_head()
            if prompt_index not in self._started:
                self._started.add(prompt_index)
                self._add_progress(prompt_index, message, parts)
        elif isinstance(message, PromptScored):
            self._take_scores(prompt_index, message)
        else:
            self._is_failed = message.code not in _ONLY_HERE
            raise to_api_error(message, max_tokens_param=self._completion.request.max_tokens_param)

    def _finish_job(self, prompt_index: int, finished: JobFinished, parts: list[bytes]) -> None:
        if self._completion.note_class(finished):
            self._change_head()
        self._received[prompt_index] = 0
        self.usage.add(finished)
        self._stopwatch.add(finished)
        self._unfinished_jobs -= 1
        if self._unfinished_jobs == 0:
            self._finish(parts)

    def _add_event(self, data: bytes, parts: list[bytes]) -> None:
        self.number += 1
        if self.number > self._skip:
            parts += (data, self._event_end(self.number))

    def _event_end(self, number: int) -> bytes:
        return b"%b%d\n\n" % (self._id, number) if self._id else EVENT_END


class PartsRenderer(EventRenderer):
    """Renders the parts of a response with one choice, after events that need no reply."""

    OPENS_AT_ONCE = True

    def __init__(self, completion: Completion, *, skip: int = 0, has_ids: bool = False) -> None:
        super().__init__(completion, skip=skip, has_ids=has_ids)
        self._stream = PartStream(completion.request)
        self._has_begun = False

    @override
    def opening(self) -> bytes:
        parts: list[bytes] = []
        self._begin(parts)
        return b"".join(parts)

    @override
    def render_plain(self, prompt_index: int, delta: Delta) -> bytes | None:
        grown = self._stream.grow(delta)
        if grown is None:
            return None
        self._received[prompt_index] += len(delta.token_ids)
        self.usage.add_reasoning(delta)
        parts: list[bytes] = []
        self._add_text(*grown, b"", parts)
        return b"".join(parts)

    @override
    def _add_delta(self, index: int, delta: Delta, parts: list[bytes]) -> None:
        self._begin(parts)
        self.usage.add_reasoning(delta)
        for change, part, text, logprobs in self._stream.add(delta):
            match change:
                case Change.BEGUN:
                    self._add_begun(part, parts)
                case Change.GROWN:
                    self._add_text(part, text, logprobs, parts)
                case Change.ENDED:
                    self._add_ended(part, parts)

    def _begin(self, parts: list[bytes]) -> None:
        """Add the first events, unless they were added."""
        if not self._has_begun:
            self._has_begun = True
            self._add_opening(parts)

    def _add_opening(self, parts: list[bytes]) -> None:
        """Add the first events."""
        raise NotImplementedError

    def _add_begun(self, part: Part, parts: list[bytes]) -> None:
        """Add the events of a part that begins."""
        raise NotImplementedError

    def _add_text(self, part: Part, text: str, logprobs: bytes, parts: list[bytes]) -> None:
        """Add the events of new text of the open part, with its log-probabilities if requested."""
        raise NotImplementedError

    def _add_ended(self, part: Part, parts: list[bytes]) -> None:
        """Add the events of a part that ends."""
        raise NotImplementedError
