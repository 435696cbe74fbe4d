"""Sixty-four streams of sixteen tenants at once, through two gateways and one engine."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest
from openai import AsyncOpenAI, OpenAI
from openai.types import Completion

from tests.e2e.asking import (
    complete,
    finish_reasons,
    joined,
    parameters,
    streamed_async,
    text,
    usage_of,
)
from tests.e2e.examples import ids_of
from tests.support.stack import Stack

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

TENANTS = 16
STREAMS = 64
LEAST_AT_ONCE = 32

LENGTH = 256
"""Completion tokens of each stream: enough for all of them to be in the engine together."""

ALONE_LENGTH = 12
"""Completion tokens that are compared with the text of a stream that runs alone: enough to distinguish all."""

PROMPTS = [f"{i}, {i + 1}, {i + 2}, {i + 3}," for i in range(1, 3 * STREAMS, 3)]
"""The model counts on from each, so that every stream has a text of its own."""


@pytest.fixture(scope="module")
def tenant_keys(stack: Stack) -> list[str]:
    return [stack.key(f"tenant-{number}") for number in range(TENANTS)]


@pytest.fixture
async def callers(stack: Stack, tenant_keys: list[str]) -> AsyncIterator[list[AsyncOpenAI]]:
    """A client for each stream: the tenants take turns, and each is seen by both gateways."""
    async with AsyncExitStack() as exits:
        yield [
            await exits.enter_async_context(
                AsyncOpenAI(
                    base_url=f"{stack.gateways[number // TENANTS % 2]}/v1",
                    api_key=tenant_keys[number % TENANTS],
                    max_retries=0,
                )
            )
            for number in range(STREAMS)
        ]


@pytest.fixture(scope="module")
def texts_alone(client: OpenAI) -> list[str]:
    """What each prompt is answered by itself."""
    return [
        text(complete(client, prompt, temperature=0, max_tokens=ALONE_LENGTH, ignore_eos=True))
        for prompt in PROMPTS
    ]


class Watched:
    """Streams that are read side by side."""

    def __init__(self) -> None:
        self._in_the_middle = 0
        self.most_at_once = 0
        """Streams of which each had begun, and none had ended."""

    async def read(self, caller: AsyncOpenAI, prompt: str) -> list[Completion]:
        """Return the chunks of one stream."""
        options = {"temperature": 0, "max_tokens": LENGTH, "ignore_eos": True, "stream": True}
        stream: Any = await caller.completions.create(**parameters(prompt, options))
        async with stream:
            chunks = [await anext(stream)]
            self._in_the_middle += 1
            self.most_at_once = max(self.most_at_once, self._in_the_middle)
            chunks += [chunk async for chunk in stream]
            self._in_the_middle -= 1
        return chunks


async def test_sixty_four_streams_run_together_each_with_its_own_text(
    callers: list[AsyncOpenAI], texts_alone: list[str]
) -> None:
    watched = Watched()
    answers = await asyncio.gather(
        *(watched.read(caller, prompt) for caller, prompt in zip(callers, PROMPTS, strict=True))
    )

    assert len(set(texts_alone)) == STREAMS
    for prompt, alone, chunks in zip(PROMPTS, texts_alone, answers, strict=True):
        assert joined(chunks).startswith(alone), prompt
        assert finish_reasons(chunks) == ["length"]
        assert usage_of(chunks[-1]).completion_tokens == LENGTH
        assert usage_of(chunks[-1]).prompt_tokens == len(ids_of(prompt))
        assert len(chunks) > LENGTH / 16, "it came in many pieces"
    assert watched.most_at_once >= LEAST_AT_ONCE


async def test_streams_that_run_together_are_told_apart(
    stack: Stack, callers: list[AsyncOpenAI]
) -> None:
    """A whole text asked plainly through one gateway is the text streamed through the other."""
    options = {"temperature": 1, "max_tokens": 60}
    pairs = list(zip(callers[:TENANTS], callers[TENANTS : 2 * TENANTS], PROMPTS, strict=False))
    answers = await asyncio.gather(
        *(
            streamed_async(caller, prompt, seed=number, **options)
            for number, (one, other, prompt) in enumerate(pairs)
            for caller in (one, other)
        )
    )

    for first, second in zip(answers[::2], answers[1::2], strict=True):
        assert joined(first) == joined(second)
    assert len({joined(answer) for answer in answers}) == TENANTS
