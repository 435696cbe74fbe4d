"""Workers with the real engine are killed again and again: every stream says what it says undisturbed."""

import asyncio
import json
import random
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import uvloop

from tests.chaos.client import DONE, Event, talk
from tests.chaos.run import RESUMED
from tests.chaos.transcript import Transcript
from tests.proofs.until import engine_tokens
from tests.support.stack import MODEL, Stack, metric, running_stack

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(3_600)]

WORKERS = ("worker-1", "worker-2")
ENGINE_START_SECONDS = 240
STREAMS = 32
MAX_TOKENS = 300
KILLS, LONG_KILLS = 2, 20
PATIENCE_SECONDS = 600.0
TOKENS_BEFORE_A_KILL = 300
"""That the engine must have put out since it got its streams, so that each is in the middle."""
ENGINE = {
    "SLUICE_MAX_SEQUENCES": str(STREAMS),
    # In bfloat16 a batch of another shape can tip a token over.
    "SLUICE_ENGINE_ARGUMENTS": '{"dtype": "float32"}',
}

_SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 1.0},
    {"temperature": 0.9, "top_k": 40, "top_p": 0.95, "min_p": 0.01},
    {"temperature": 1.0, "frequency_penalty": 0.4, "presence_penalty": 0.3},
)


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    """A gateway and two workers of its own, which can be killed."""
    with running_stack() as stack:
        stack.start_gateway()
        for name in WORKERS:
            stack.start_worker(name, ready_seconds=ENGINE_START_SECONDS, **ENGINE)
        yield stack


def body_of(number: int) -> dict[str, Any]:
    """Return the request of one stream; the streams differ in prompt, seed and sampling."""
    return {
        "model": MODEL,
        "prompt": f"Story {number}: once upon a time",
        "max_tokens": MAX_TOKENS,
        "ignore_eos": True,
        "return_token_ids": True,
        "seed": 1_000 + number,
        "stream": True,
        "stream_options": {"include_usage": True},
        **_SAMPLINGS[number % len(_SAMPLINGS)],
    }


async def read(stack: Stack, key: str, number: int) -> Transcript:
    """Return what one stream tells, which must come to its end."""
    transcript = Transcript()

    def on_event(event: Event) -> bool:
        if event.data == DONE:
            transcript.is_done = True
        else:
            transcript.add(json.loads(event.data))
        return False

    await talk(
        stack.url,
        key,
        "/v1/completions",
        patience=PATIENCE_SECONDS,
        body=body_of(number),
        on_event=on_event,
    )
    assert transcript.is_done, f"stream {number} has no end"
    assert transcript.error is None, f"stream {number}: {transcript.error}"
    return transcript


async def keep_reading(
    stack: Stack, key: str, number: int, *, expected: Transcript, is_over: asyncio.Event
) -> int:
    """Read the same stream again and again until it is over; return how often."""
    times = 0
    while not is_over.is_set():
        told = await read(stack, key, number)
        assert told.difference(expected) == "", f"stream {number}, time {times}"
        times += 1
    return times


async def kill_again_and_again(stack: Stack, kills: int, rng: random.Random) -> None:
    """Kill the worker that has streams, start it again, and go on with the other one."""
    for kill in range(kills):
        victim = WORKERS[kill % len(WORKERS)]
        before = await asyncio.to_thread(engine_tokens, stack, victim)
        async with asyncio.timeout(PATIENCE_SECONDS):
            while (
                await asyncio.to_thread(engine_tokens, stack, victim)
                < before + TOKENS_BEFORE_A_KILL
            ):
                await asyncio.sleep(0.05)
        await asyncio.sleep(rng.uniform(0, 1))
        stack.kill(victim)
        await asyncio.to_thread(
            stack.start_worker, victim, ready_seconds=ENGINE_START_SECONDS, **ENGINE
        )


async def prove(stack: Stack, key: str, kills: int) -> Mapping[int, int]:
    """Return how often each stream was read while workers were killed."""
    numbers = range(STREAMS)
    undisturbed = await asyncio.gather(*(read(stack, key, number) for number in numbers))
    is_over = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        readers = [
            tasks.create_task(
                keep_reading(stack, key, number, expected=undisturbed[number], is_over=is_over)
            )
            for number in numbers
        ]
        await kill_again_and_again(stack, kills, random.Random(1))
        is_over.set()
    return {number: reader.result() for number, reader in enumerate(readers)}


def test_streams_of_killed_workers_say_what_they_say_undisturbed(
    stack: Stack, request: pytest.FixtureRequest
) -> None:
    kills = LONG_KILLS if request.config.getoption("--long") else KILLS
    times = uvloop.run(prove(stack, stack.key(), kills))
    resumed = metric(stack.url, RESUMED)
    print(  # noqa: T201  (figures for whoever runs pytest with -rP)
        f"{kills} kills, {sum(times.values())} streams, {resumed:.0f} jobs resumed"
    )
    # Each kill met a worker in the middle of streams, or this proves nothing.
    assert resumed >= kills
