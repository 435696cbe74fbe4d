"""Collects the replies of a request into one body."""

import asyncio
from collections.abc import AsyncIterator
from typing import NamedTuple

import msgspec

from contract.messages import Delta, JobFinished, PromptScored
from gateway.dispatch.generation import Generation, Reply
from gateway.errors import ServiceUnavailableError
from gateway.stream.choice import Choice
from gateway.stream.completion import Completion, Usage
from gateway.stream.failures import to_api_error
from gateway.stream.kinds import choice_type
from gateway.stream.prompt_logprobs import PromptLogprobs
from gateway.stream.timings import Stopwatch, timing_headers, timing_members, usage_body

LARGE_BYTES = 64 * 1024
"""Size of a choice that takes noticeable time to encode."""


class WholeAnswer(NamedTuple):
    """An answer that is not streamed."""

    content: bytes
    usage: Usage
    headers: dict[str, str]
    """Times of the answer, in dialects that tell them in headers."""


async def collect(completion: Completion, generation: Generation) -> WholeAnswer:
    """Wait for the whole answer. Raises an ApiError if a job fails."""
    assembler = _Assembler(completion)
    while assembler.unfinished_jobs and not generation.overflowed:
        for reply in await generation.replies():
            assembler.add(reply)
    if generation.overflowed:
        raise ServiceUnavailableError("The answer is larger than the gateway holds.")
    return await assembler.answer()


class _Assembler:
    def __init__(self, completion: Completion) -> None:
        self._completion = completion
        self._usage = completion.new_usage()
        self._stopwatch = Stopwatch(completion.started_at)
        self._prompt_logprobs = PromptLogprobs(completion)
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
        elif isinstance(message, PromptScored):
            encoded = self._prompt_logprobs.encode(reply.prompt_index, message)
            first = self._completion.choice_index(reply.prompt_index, 0)
            for choice in self._choices[first : first + self._completion.request.n]:
                choice.take_prompt_logprobs(encoded)
        else:
            raise to_api_error(message)

    async def answer(self) -> WholeAnswer:
        completion, usage = self._completion, self._usage
        request, shape = completion.request, completion.request.profile.timing
        if request.best_of > request.n:
            usage.discarded_tokens = usage.completion_tokens - self._returned_tokens
        timings = self._stopwatch.timings(usage)
        content = msgspec.json.encode(
            {
                **completion.head(),
                "choices": [msgspec.Raw(choice) async for choice in self._encoded_choices()],
                "usage": usage_body(usage, timings, shape) | completion.cost(usage),
                **timing_members(timings, request),
            }
        )
        return WholeAnswer(content, usage, timing_headers(timings, shape))

    async def _encoded_choices(self) -> AsyncIterator[bytes]:
        for choice in self._choices:
            encoded = msgspec.json.encode(choice.whole())
            yield encoded
            if len(encoded) > LARGE_BYTES:
                # Many large choices in one go would hold up every other request.
                await asyncio.sleep(0)
