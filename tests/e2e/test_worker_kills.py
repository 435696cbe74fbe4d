"""Workers with the real engine are killed again and again: every stream says what it says undisturbed."""

from collections.abc import Iterator
from typing import Any

import pytest
import uvloop

from tests.e2e.killing import (
    KILLS,
    LONG_KILLS,
    STREAMS,
    Asked,
    assert_resumed,
    killable_stack,
    read_under_kills,
    undisturbed,
)
from tests.support.stack import Stack

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(3_600)]

MAX_TOKENS = 300
_SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 1.0},
    {"temperature": 0.9, "top_k": 40, "top_p": 0.95, "min_p": 0.01},
    {"temperature": 1.0, "frequency_penalty": 0.4, "presence_penalty": 0.3},
)


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    """A gateway and two workers of its own, which can be killed."""
    with killable_stack() as stack:
        yield stack


def asked(number: int) -> Asked:
    """Return the request of one stream; the streams differ in prompt, seed and sampling."""
    body = {
        "prompt": f"Story {number}: once upon a time",
        "max_tokens": MAX_TOKENS,
        "ignore_eos": True,
        "seed": 1_000 + number,
        **_SAMPLINGS[number % len(_SAMPLINGS)],
    }
    return Asked("/v1/completions", body)


def test_streams_of_killed_workers_say_what_they_say_undisturbed(
    stack: Stack, request: pytest.FixtureRequest
) -> None:
    kills = LONG_KILLS if request.config.getoption("--long") else KILLS
    streams, key = [asked(number) for number in range(STREAMS)], stack.key()

    async def prove() -> list[int]:
        expected = await undisturbed(stack, key, streams)
        return await read_under_kills(stack, key, streams, expected, kills=kills)

    assert_resumed(stack, uvloop.run(prove()), kills=kills)
