"""Kills workers with the real engine under streams."""

import asyncio
import json
import os
import random
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import SERVICE_UNAVAILABLE
from typing import Any

import uvloop
from redis import Redis

from contract import keys
from tests.failures.chaos.client import DONE, Event, Reply, talk
from tests.failures.chaos.run import RESUMED, keep_logs
from tests.failures.chaos.transcript import Transcript
from tests.failures.proofs.until import engine_tokens, until
from tests.support.processes import children, descendants, is_alive, resident_pages
from tests.support.stack import MODEL, Stack, metric, running_stack

WORKERS = ("worker-1", "worker-2")
STREAMS = 32
LONG_KILLS = 20
STOPPED_EVERY = 3
STOPPED_SECONDS = 1.0
GONE = "sluice_gateway_gone_workers_total"
PATIENCE_SECONDS = 600.0
TOKENS_BEFORE_A_KILL = 300
"""Fewest tokens that the engine generates before a kill, so that every stream has begun."""
ENGINE = {
    "SLUICE_MAX_SEQUENCES": str(STREAMS),
    "SLUICE_ADAPTER_SLOTS": "4",
    # In bfloat16 a batch of another shape can change a token.
    "SLUICE_ENGINE_ARGUMENTS": '{"dtype": "float32"}',
}


_TOKEN_PATHS = ("/v1/completions", "/v1/chat/completions")
"""Where token ids and usage are options."""


@dataclass(frozen=True, slots=True)
class StreamRequest:
    """A request for a stream."""

    path: str
    body: dict[str, Any]

    @property
    def streamed(self) -> dict[str, Any]:
        """The body, with the options for streams, unless it says that it is none."""
        body = {"model": MODEL, "stream": True, **self.body}
        if self.path in _TOKEN_PATHS:
            body["return_token_ids"] = True
            if body["stream"]:
                body["stream_options"] = {"include_usage": True}
        return body


@contextmanager
def killable_stack() -> Iterator[Stack]:
    """Run a gateway for the length of a block; tests start the workers that they need."""
    with running_stack() as stack:
        try:
            stack.start_gateway()
            yield stack
        finally:
            keep_logs(stack)


def start_workers(stack: Stack, names: Sequence[str] = WORKERS) -> None:
    """Start the workers that are not running, concurrently."""
    missing = [name for name in names if name not in stack.processes]
    for name in missing:
        stack.launch_worker(name, ENGINE)
    for name in missing:
        stack.await_worker(name)


async def read(stack: Stack, key: str, stream_request: StreamRequest) -> Transcript:
    """Return the transcript of one stream, which must end."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        transcript, retry_after = await _read_once(stack, key, stream_request)
        while retry_after is not None:
            await asyncio.sleep(retry_after)
            transcript, retry_after = await _read_once(stack, key, stream_request)
    assert transcript.error is None, f"{stream_request.body}: {transcript.error} after {transcript}"
    assert transcript.is_done, f"{stream_request.body} has no end"
    return transcript


def _retry_after(reply: Reply, transcript: Transcript) -> float | None:
    """Return the `Retry-After` of a refusal, in seconds; None for any other reply.

    On a busy machine a gateway may miss the worker, replies of Redis or the end of a grammar's
    compilation.
    """
    if transcript.error is None or reply.status != SERVICE_UNAVAILABLE:
        return None
    return reply.retry_after


async def _read_once(
    stack: Stack, key: str, stream_request: StreamRequest
) -> tuple[Transcript, float | None]:
    """Return the transcript of one stream, and the `Retry-After` if it was refused."""
    transcript = Transcript()

    def on_event(event: Event) -> bool:
        if event.data == DONE:
            transcript.is_done = True
        else:
            transcript.add(json.loads(event.data))
        return False

    reply = await talk(
        stack.url,
        key,
        stream_request.path,
        patience=PATIENCE_SECONDS,
        body=stream_request.streamed,
        on_event=on_event,
    )
    assert reply.is_complete, f"{stream_request.body}: the connection broke after {transcript}"
    if not reply.is_stream:
        transcript.add(reply.json)
        transcript.is_done = not transcript.error
    return transcript, _retry_after(reply, transcript)


async def keep_reading(
    stack: Stack,
    key: str,
    stream_request: StreamRequest,
    *,
    expected: Transcript,
    is_over: asyncio.Event,
) -> int:
    """Read the same stream repeatedly until `is_over`; return how often."""
    times = 0
    while not is_over.is_set():
        reported = await read(stack, key, stream_request)
        difference = reported.difference(expected)
        assert not difference, f"{stream_request.body}, time {times}: {difference}"
        times += 1
    return times


async def kill_repeatedly(stack: Stack, kills: int, rng: random.Random) -> None:
    """Kill the worker that has streams, and restart it before the next kill.

    Every third worker is first stopped until its jobs run elsewhere, and continues. After the last
    kill the streams end on the other worker.
    """
    for kill in range(kills):
        await asyncio.to_thread(start_workers, stack)
        victim = WORKERS[kill % len(WORKERS)]
        before = await asyncio.to_thread(engine_tokens, stack, victim)
        tokens = TOKENS_BEFORE_A_KILL + rng.randrange(TOKENS_BEFORE_A_KILL)
        async with asyncio.timeout(PATIENCE_SECONDS):
            while await asyncio.to_thread(engine_tokens, stack, victim) < before + tokens:
                await asyncio.sleep(0.02)
        if kill % STOPPED_EVERY == 0:
            await stop_and_continue(stack, victim)
        await kill_worker(stack, victim)


async def stop_and_continue(stack: Stack, worker: str) -> None:
    """Stop a worker's process, but not its engine, until gateways find it gone."""
    pid, watched = stack.processes[worker].pid, keys.watched_workers(MODEL)
    with Redis.from_url(stack.redis.url) as store:

        def is_gone() -> bool:
            names: list[bytes] = store.zrange(watched, 0, -1)
            return not any(f"-{pid}-" in name.decode() for name in names)

        await until(lambda: not is_gone(), what=f"a heartbeat of {worker}")
        os.kill(pid, signal.SIGSTOP)
        try:
            await until(is_gone, what=f"{worker} being gone")
        finally:
            os.kill(pid, signal.SIGCONT)
    # Its late replies and reports are rejected.
    await asyncio.sleep(STOPPED_SECONDS)


async def kill_worker(stack: Stack, worker: str) -> None:
    """Kill a worker, and wait until none of its processes is left."""
    left = descendants(stack.processes[worker].pid)
    assert left
    stack.kill(worker)
    await until(lambda: not any(map(is_alive, left)), what="the end of its processes")


def engine_core(stack: Stack, worker: str) -> int:
    """Return the process of a worker's engine: its child with the most memory."""
    return max(children(stack.processes[worker].pid), key=resident_pages)


async def undisturbed(stack: Stack, key: str, streams: Sequence[StreamRequest]) -> list[Transcript]:
    """Return the transcript of each stream without any kill."""
    return await asyncio.gather(*(read(stack, key, each) for each in streams))


async def read_under_kills(
    stack: Stack, streams: Sequence[tuple[str, StreamRequest, Transcript]], *, kills: int
) -> list[int]:
    """Assert that each stream equals the expected one while workers are killed.

    Each has the key of its tenant. Return how often the streams were read.
    """
    is_over = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        readers = [
            tasks.create_task(keep_reading(stack, key, each, expected=reported, is_over=is_over))
            for key, each, reported in streams
        ]
        await kill_repeatedly(stack, kills, random.Random(1))
        is_over.set()
    return [reader.result() for reader in readers]


def assert_kills_change_nothing(
    stack: Stack,
    streams: Sequence[StreamRequest],
    *,
    kills: int,
    check: Callable[[Sequence[Transcript]], None] = lambda _: None,
    others: Sequence[StreamRequest] = (),
) -> None:
    """Assert that each stream is the same with and without kills.

    `check` receives the undisturbed transcripts. Another tenant reads `others` meanwhile.
    """
    start_workers(stack)
    key, other = stack.key(), stack.key("other")
    before, gone = metric(stack.operators, RESUMED), metric(stack.operators, GONE)

    async def prove() -> list[int]:
        expected = await undisturbed(stack, key, streams)
        check(expected)
        both = [(key, *pair) for pair in zip(streams, expected, strict=True)]
        expected = await undisturbed(stack, other, others)
        both += [(other, *pair) for pair in zip(others, expected, strict=True)]
        return await read_under_kills(stack, both, kills=kills)

    times = uvloop.run(prove())
    resumed = metric(stack.operators, RESUMED) - before
    print(  # noqa: T201  (figures for pytest -rP)
        f"{kills} kills, {sum(times)} streams, {resumed:.0f} jobs resumed"
    )
    # Each kill interrupted a worker's streams, or this proves nothing.
    assert resumed >= kills
    assert metric(stack.operators, GONE) - gone >= kills
