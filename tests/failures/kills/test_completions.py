"""Workers with the real engine are killed repeatedly: every stream equals the undisturbed one."""

from typing import Any

import pytest

from tests.failures.kills.killing import (
    LONG_KILLS,
    STREAMS,
    StreamRequest,
    assert_kills_change_nothing,
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


def stream_request(number: int) -> StreamRequest:
    """Return the request of one stream; the streams differ in prompt, seed and sampling."""
    body = {
        "prompt": f"Story {number}: once upon a time",
        "max_tokens": MAX_TOKENS,
        "ignore_eos": True,
        "seed": 1_000 + number,
        **_SAMPLINGS[number % len(_SAMPLINGS)],
    }
    return StreamRequest("/v1/completions", body)


@pytest.mark.long
def test_streams_of_killed_workers_equal_undisturbed_ones(stack: Stack) -> None:
    assert_kills_change_nothing(
        stack, [stream_request(number) for number in range(STREAMS)], kills=LONG_KILLS
    )
