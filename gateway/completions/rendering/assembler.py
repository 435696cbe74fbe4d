"""Response assembler: collect the replies of a request into one JSON body."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

import msgspec
from typing_extensions import override

from contract.messages import Delta, JobFailed, JobFinished, JobStarted, PromptScored
from gateway.completions.queue.generation import REPLIES_AT_ONCE, Reply, Turn
from gateway.completions.rendering.choice import Choice
from gateway.completions.rendering.completion import Completion, Usage
from gateway.completions.rendering.content_parts import PartStream
from gateway.completions.rendering.failures import to_api_error
from gateway.completions.rendering.kinds import choice_type
from gateway.completions.rendering.prompt_logprobs import PromptLogprobs
from gateway.completions.rendering.timings import Stopwatch, shown_timings

LARGE_BYTES: Final = 262_144
"""Longer parts of a response are joined in a turn."""

T = TypeVar("T")


class WholeResponse(NamedTuple):
    """A response that is not streamed."""

    content: bytes
    usage: Usage
    headers: dict[str, str]
    """Timings, in dialects that send them in headers."""


class Assembler:
    """Collects the replies of one request."""

    def __init__(self, completion: Completion) -> None:
        self.completion = completion
        self.usage = completion.new_usage()
        self.stopwatch = Stopwatch(completion.started_at)
        self.prompt_logprobs = PromptLogprobs(completion)
        self.unfinished_jobs = len(completion.request.prompts)

    def add(self, reply: Reply) -> None:
        """Add a reply. Raises an ApiError if its job has failed."""
        message = reply.message
        if isinstance(message, Delta):
            self.usage.add_reasoning(message)
            self.add_delta(reply.prompt_index, message)
        elif isinstance(message, JobStarted):
            self.completion.note_class(message)
        elif isinstance(message, JobFinished):
            self.completion.note_class(message)
            self.usage.add(message)
            self.stopwatch.add(message)
            self.unfinished_jobs -= 1
            self.take_finished(reply.prompt_index, message)
        elif isinstance(message, PromptScored):
            self.take_scores(reply.prompt_index, message)
        elif isinstance(message, JobFailed):
            raise to_api_error(message, max_tokens_param=self.completion.request.max_tokens_param)

    def add_delta(self, prompt_index: int, delta: Delta) -> None:
        """Add new text."""
        raise NotImplementedError

    def take_finished(self, prompt_index: int, finished: JobFinished) -> None:
        """Store the counts of a finished job, in a form that shows them for each choice."""

    def take_scores(self, prompt_index: int, scored: PromptScored) -> None:
        """Store the log-probabilities of a prompt, in a form that shows them."""

    async def response(self, turn: Turn) -> WholeResponse:
        """Return the response. All jobs must have finished."""
        raise NotImplementedError


class PartsAssembler(Assembler):
    """Collects the parts of a response with one choice."""

    def __init__(self, completion: Completion) -> None:
        super().__init__(completion)
        self.stream = PartStream(completion.request)

    @override
    def add_delta(self, prompt_index: int, delta: Delta) -> None:
        self.stream.add(delta)

    @override
    async def response(self, turn: Turn) -> WholeResponse:
        content = await in_turn(turn, lambda: msgspec.json.encode(self.body()), size=self.size)
        return WholeResponse(content, self.usage, {})

    @property
    def size(self) -> int:
        """About the bytes of the response."""
        return sum(len(part.text) for part in self.stream.parts)

    def body(self) -> dict[str, Any]:
        """Return the body of the response."""
        raise NotImplementedError


class ChoicesAssembler(Assembler):
    """Collects the choices of a completion or chat."""

    def __init__(self, completion: Completion) -> None:
        super().__init__(completion)
        self._returned_tokens = 0
        make_choice = choice_type(completion.request)
        self._choices: list[Choice] = [
            make_choice(completion, index) for index in range(completion.choices)
        ]

    @override
    def add_delta(self, prompt_index: int, delta: Delta) -> None:
        self._choices[self.completion.choice_index(prompt_index, delta.choice)].add(delta)
        self._returned_tokens += len(delta.token_ids)

    @override
    def take_finished(self, prompt_index: int, finished: JobFinished) -> None:
        for choice in self._choices_of(prompt_index):
            choice.take_finished(finished)

    @override
    def take_scores(self, prompt_index: int, scored: PromptScored) -> None:
        encoded = self.prompt_logprobs.encode(prompt_index, scored)
        for choice in self._choices_of(prompt_index):
            choice.take_prompt_logprobs(encoded)

    @override
    async def response(self, turn: Turn) -> WholeResponse:
        completion, usage = self.completion, self.usage
        request = completion.request
        if request.best_of > request.n:
            usage.discarded_tokens = usage.completion_tokens - self._returned_tokens
        timings = shown_timings(self.stopwatch, usage, request)
        choices = await self._encoded_choices(turn)
        body: Any = {
            **completion.head(),
            "choices": choices,
            **self._choices[0].take_members(),
            "usage": usage.body() | timings.in_usage | completion.cost(usage),
            **timings.beside_usage,
        }
        if request.is_native:
            body = choices[0] if len(choices) == 1 else choices
        content = await in_turn(turn, partial(msgspec.json.encode, body), size=_size(choices))
        return WholeResponse(content, usage, timings.headers)

    def _choices_of(self, prompt_index: int) -> list[Choice]:
        first = self.completion.choice_index(prompt_index, 0)
        return self._choices[first : first + self.completion.request.n]

    async def _encoded_choices(self, turn: Turn) -> list[msgspec.Raw]:
        has_logprobs = self.completion.request.logprobs is not None
        if len(self._choices) < REPLIES_AT_ONCE and not has_logprobs:
            return [_encoded(choice) for choice in self._choices]
        choices = []
        for choice in self._choices:
            async with turn():
                choices.append(_encoded(choice))
        return choices


async def in_turn(turn: Turn, make: Callable[[], T], *, size: int) -> T:
    """Make something of `size` bytes, in a turn if these are many."""
    if size < LARGE_BYTES:
        return make()
    async with turn():
        return make()


def _size(parts: Iterable[msgspec.Raw]) -> int:
    return sum(len(memoryview(part)) for part in parts)


def _encoded(choice: Choice) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(choice.whole()))
