"""The heartbeat thread: what starves it, and what keeps its connection open."""

import asyncio
import os
import stat
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from redis.asyncio import Redis

from contract import keys
from contract.queue import JobQueue
from tests.support.patience import PATIENCE_SECONDS
from tests.support.redis_server import RedisServer
from worker import telemetry
from worker.queue.heartbeat import WorkerHeartbeat

MODEL = "beating"
WORKER = "w1"
LEASE_MS = 3_000
"""Commands may take half of it, also on a busy machine."""


@asynccontextmanager
async def heartbeat(url: str) -> AsyncIterator[WorkerHeartbeat]:
    """Send heartbeats for the length of a block."""
    heartbeat = WorkerHeartbeat(url, MODEL, WORKER, lease_ms=LEASE_MS)
    heartbeat.start()
    try:
        yield heartbeat
    finally:
        await heartbeat.aclose()


def beats() -> float:
    """Return the number of heartbeats so far."""
    (metric,) = telemetry.HEARTBEAT_GAP.collect()
    return next(each.value for each in metric.samples if each.name.endswith("_count"))


async def until(condition: Callable[[], Awaitable[object]]) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not await condition():
            await asyncio.sleep(0.01)


async def is_watched(redis: Redis) -> bool:
    return await redis.zscore(keys.watched_workers(MODEL), WORKER) is not None


async def test_heartbeats_continue_while_the_event_loop_is_blocked(
    redis: Redis, redis_server: RedisServer
) -> None:
    async with heartbeat(redis_server.url):
        await until(lambda: is_watched(redis))
        before, patient_until = beats(), time.monotonic() + PATIENCE_SECONDS
        while beats() < before + 2:
            assert time.monotonic() < patient_until
            time.sleep(0.01)  # noqa: ASYNC251 - blocks the loop on purpose
    assert not await is_watched(redis)


async def test_closed_connection_is_replaced(redis: Redis, redis_server: RedisServer) -> None:
    async def is_connected() -> bool:
        ((_, number),) = await redis.pubsub_numsub(keys.worker_channel(MODEL, WORKER))
        return bool(number)

    async with heartbeat(redis_server.url):
        await until(lambda: is_watched(redis))
        await redis.client_kill_filter(_type="pubsub")
        await until(is_connected)
        before = beats()

        async def has_beaten() -> bool:
            return beats() > before

        await until(has_beaten)


async def test_heartbeats_go_on_after_a_bug(
    redis: Redis, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, errors = WorkerHeartbeat._beat, [RuntimeError("a bug")]

    async def beat(self: WorkerHeartbeat, queue: JobQueue) -> bool:
        if errors:
            raise errors.pop()
        return await original(self, queue)

    monkeypatch.setattr(WorkerHeartbeat, "_beat", beat)
    async with heartbeat(redis_server.url):
        await until(lambda: is_watched(redis))
    assert not errors


async def test_fork_does_not_keep_the_connection_open(
    redis: Redis, redis_server: RedisServer
) -> None:
    async with heartbeat(redis_server.url) as beating:
        await until(lambda: is_watched(redis))
        assert beating._subscription is not None
        connection: Any = beating._subscription.connection
        number = connection._writer.get_extra_info("socket").fileno()
        if not (fork := os.fork()):
            os._exit(stat.S_ISSOCK(os.fstat(number).st_mode))
        assert (await asyncio.to_thread(os.waitpid, fork, 0))[1] == 0
        assert stat.S_ISSOCK(os.fstat(number).st_mode)


async def test_worker_whose_user_may_not_subscribe_is_not_watched(
    redis: Redis, redis_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    await redis.acl_setuser(
        "old", enabled=True, passwords=["+secret"], keys=["*"], commands=["+@all", "-@pubsub"]
    )

    async def is_logged() -> bool:
        return "Could not send heartbeats" in caplog.text

    try:
        async with heartbeat(redis_server.url.replace("://", "://old:secret@")):
            await until(is_logged)
            assert not await is_watched(redis)
    finally:
        await redis.acl_deluser("old")
