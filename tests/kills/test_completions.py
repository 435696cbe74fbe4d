"""Workers with the real engine are killed again and again: every stream says what it says undisturbed."""

from typing import Any

import pytest

from tests.kills.killing import LONG_KILLS, STREAMS, Asked, prove_that_kills_change_nothing
from tests.support.stack import Stack

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(3_600)]

MAX_TOKENS = 300
_SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 1.0},
    {"temperature": 0.9, "top_k": 40, "top_p": 0.95, "min_p": 0.01},
    {"temperature": 1.0, "frequency_penalty": 0.4, "presence_penalty": 0.3},
)


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


@pytest.mark.long
def test_streams_of_killed_workers_say_what_they_say_undisturbed(stack: Stack) -> None:
    prove_that_kills_change_nothing(
        stack, [asked(number) for number in range(STREAMS)], kills=LONG_KILLS
    )
