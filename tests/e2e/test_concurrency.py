"""Sixty-four concurrent streams of sixteen tenants, through two gateways and one engine."""

import asyncio
from functools import partial
from typing import Any

import pytest
from openai import AsyncOpenAI, OpenAI
from openai.types import Completion

from tests.e2e.at_once import at_once
from tests.e2e.completions import (
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

pytestmark = pytest.mark.e2e

TENANTS = 16
STREAMS = 64
LEAST_AT_ONCE = 32

LENGTH = 128
"""Completion tokens of each stream: enough for all of them to be in the engine together."""

COMPARED_LENGTH = 12
"""Completion tokens that are compared with a quiet engine's: enough to distinguish all streams."""
FEW = 8

PROMPTS = [f"{i}, {i + 1}, {i + 2}, {i + 3}," for i in range(1, 3 * STREAMS, 3)]
"""The model counts on from each, so that every stream has its own text."""


@pytest.fixture(scope="module")
def tenant_keys(stack: Stack) -> list[str]:
    return [stack.key(f"tenant-{number}") for number in range(TENANTS)]


@pytest.fixture
def callers(stack: Stack, async_client: AsyncOpenAI, tenant_keys: list[str]) -> list[AsyncOpenAI]:
    """A client for each stream; tenants alternate, and each uses both gateways."""
    return [
        async_client.with_options(
            base_url=f"{stack.gateways[number // TENANTS % 2]}/v1",
            api_key=tenant_keys[number % TENANTS],
        )
        for number in range(STREAMS)
    ]


@pytest.fixture(scope="module")
def texts_of_few(client: OpenAI) -> list[str]:
    """The whole response to each prompt on a quiet engine."""
    options = {"temperature": 0, "max_tokens": COMPARED_LENGTH, "ignore_eos": True}
    return [
        text(answer)
        for first in range(0, STREAMS, FEW)
        for answer in at_once(
            *(partial(complete, client, each, **options) for each in PROMPTS[first : first + FEW])
        )
    ]


class Watched:
    """Streams that are read concurrently."""

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


async def test_sixty_four_concurrent_streams_have_their_own_texts(
    callers: list[AsyncOpenAI], texts_of_few: list[str]
) -> None:
    watched = Watched()
    answers = await asyncio.gather(
        *(watched.read(caller, prompt) for caller, prompt in zip(callers, PROMPTS, strict=True))
    )

    assert len(set(texts_of_few)) == STREAMS
    for prompt, expected, chunks in zip(PROMPTS, texts_of_few, answers, strict=True):
        assert joined(chunks).startswith(expected), prompt
        assert finish_reasons(chunks) == ["length"]
        assert usage_of(chunks[-1]).completion_tokens == LENGTH
        assert usage_of(chunks[-1]).prompt_tokens == len(ids_of(prompt))
        assert len(chunks) > 1
    assert sum(map(len, answers)) > STREAMS * LENGTH / 32, "they came in many pieces"
    assert watched.most_at_once >= LEAST_AT_ONCE


async def test_concurrent_streams_keep_their_own_texts(
    stack: Stack, callers: list[AsyncOpenAI]
) -> None:
    """A whole response of one gateway equals the stream of the other."""
    options = {"temperature": 1, "max_tokens": 24}
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
