"""Response assembler: collect the replies of a request into one JSON body."""

import asyncio
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from contract.messages import Delta, JobFailed, JobFinished, PromptScored
from gateway.completions.queue.generation import REPLIES_AT_ONCE, Generation, Reply, Turn, in_slices
from gateway.completions.rendering.choice import Choice
from gateway.completions.rendering.completion import Completion, Usage
from gateway.completions.rendering.failures import to_api_error
from gateway.completions.rendering.kinds import choice_type
from gateway.completions.rendering.prompt_logprobs import PromptLogprobs
from gateway.completions.rendering.timings import Stopwatch, shown_timings

THREAD_TOKENS = 256
"""Above this many tokens per choice, log-probabilities are encoded in a thread."""


class WholeResponse(NamedTuple):
    """A response that is not streamed."""

    content: bytes
    usage: Usage
    headers: dict[str, str]
    """Timings, in dialects that send them in headers."""


async def collect(
    completion: Completion, generation: Generation, *, check: Callable[[], None] = lambda: None
) -> WholeResponse:
    """Wait for the whole response. Raises an ApiError if a job fails.

    `check` may raise to end this. Wake the generation when it would.
    """
    assembler = _Assembler(completion)
    while assembler.unfinished_jobs:
        check()
        replies = await generation.replies()
        if len(replies) < REPLIES_AT_ONCE and completion.request.scored_alternatives is None:
            for reply in replies:
                assembler.add(reply)
            continue
        for some in in_slices(replies):
            await assembler.prompt_logprobs.prepare(some, generation.turn)
            async with generation.turn_for(some):
                for reply in some:
                    assembler.add(reply)
    return await assembler.response(generation.turn)


class _Assembler:
    def __init__(self, completion: Completion) -> None:
        self._completion = completion
        self._usage = completion.new_usage()
        self._stopwatch = Stopwatch(completion.started_at)
        self.prompt_logprobs = PromptLogprobs(completion)
        self._returned_tokens = 0
        make_choice = choice_type(completion.request)
        self._choices: list[Choice] = [
            make_choice(completion, index) for index in range(completion.choices)
        ]
        self.unfinished_jobs = len(completion.request.prompts)

    def add(self, reply: Reply) -> None:
        message = reply.message
        if isinstance(message, Delta):
            index = self._completion.choice_index(reply.prompt_index, message.choice)
            self._choices[index].add(message)
            self._returned_tokens += len(message.token_ids)
            self._usage.add_reasoning(message)
        elif isinstance(message, JobFinished):
            self._usage.add(message)
            self._stopwatch.add(message)
            self.unfinished_jobs -= 1
            for choice in self._choices_of(reply.prompt_index):
                choice.take_finished(message)
        elif isinstance(message, PromptScored):
            encoded = self.prompt_logprobs.encode(reply.prompt_index, message)
            for choice in self._choices_of(reply.prompt_index):
                choice.take_prompt_logprobs(encoded)
        elif isinstance(message, JobFailed):
            raise to_api_error(message)

    async def response(self, turn: Turn) -> WholeResponse:
        completion, usage = self._completion, self._usage
        request = completion.request
        if request.best_of > request.n:
            usage.discarded_tokens = usage.completion_tokens - self._returned_tokens
        timings = shown_timings(self._stopwatch, usage, request)
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
        return WholeResponse(msgspec.json.encode(body), usage, timings.headers)

    def _choices_of(self, prompt_index: int) -> list[Choice]:
        first = self._completion.choice_index(prompt_index, 0)
        return self._choices[first : first + self._completion.request.n]

    async def _encoded_choices(self, turn: Turn) -> list[msgspec.Raw]:
        has_logprobs = self._completion.request.logprobs is not None
        if len(self._choices) < REPLIES_AT_ONCE and not has_logprobs:
            return [_encoded(choice) for choice in self._choices]
        choices = []
        is_slow = has_logprobs and self._returned_tokens > THREAD_TOKENS * len(self._choices)
        for choice in self._choices:
            async with turn():
                encoded = await asyncio.to_thread(_encoded, choice) if is_slow else _encoded(choice)
            choices.append(encoded)
        return choices


def _encoded(choice: Choice) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(choice.whole()))
