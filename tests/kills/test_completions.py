"""Workers and engines are killed under streams: every stream says what it says undisturbed."""

import asyncio
import os
import signal
from typing import Any

import pytest
import uvloop

from tests.kills.killing import (
    LONG_KILLS,
    STREAMS,
    TOKENS_BEFORE_A_KILL,
    Asked,
    engine_core,
    prove_that_kills_change_nothing,
    read,
    undisturbed,
)
from tests.proofs.until import generating
from tests.support.processes import descendants, is_alive
from tests.support.stack import Stack, metric

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


def test_an_engine_that_dies_is_followed_by_another_one(stack: Stack) -> None:
    """The worker starts it and resumes its streams; then it is stopped under streams, and finishes them."""
    worker = next(name for name in stack.processes if name.startswith("worker"))
    for other in [name for name in stack.processes if name.startswith("worker") and name != worker]:
        stack.kill(other)
    key, streams = stack.key(), [asked(number) for number in range(4)]
    first_core = engine_core(stack, worker)

    async def prove() -> None:
        expected = await undisturbed(stack, key, streams)
        for is_last in (False, True):
            async with asyncio.TaskGroup() as tasks:
                reading = [tasks.create_task(read(stack, key, each)) for each in streams]
                await generating(stack, worker=worker, tokens=TOKENS_BEFORE_A_KILL)
                left = descendants(stack.processes[worker].pid)
                if is_last:
                    assert await asyncio.to_thread(stack.stop, worker) == 0
                    assert not any(map(is_alive, left))
                else:
                    os.kill(first_core, signal.SIGKILL)
            for told, transcript in zip(reading, expected, strict=True):
                assert not told.result().difference(transcript)
            if not is_last:
                restarts = metric(stack.worker_url(worker), "sluice_worker_engine_restarts_total")
                assert restarts == 1
                assert not is_alive(first_core)

    uvloop.run(prove())


@pytest.mark.long
def test_streams_of_killed_workers_say_what_they_say_undisturbed(stack: Stack) -> None:
    prove_that_kills_change_nothing(
        stack, [asked(number) for number in range(STREAMS)], kills=LONG_KILLS
    )
