"""Clients of a master that sentinels watch: where it goes, they go."""

import asyncio
from collections.abc import Iterator

import pytest
from redis.asyncio import Redis
from redis.exceptions import RedisError

from contract import keys
from contract.redis_url import blocking_redis_client, redis_client
from gateway.accounts.usage import encode_usage
from gateway.redis_client import PipeliningExecutor, connect
from tests.support.processes import wait_until
from tests.support.redis_server import BUNDLED, SYSTEM
from tests.support.sentinels import WatchedRedis, running_watched_redis
from tests.support.stack import running_stack
from tests.support.usage import usage_record

PATIENCE_SECONDS = 30.0
DRAIN_SECONDS = 60.0


@pytest.fixture(params=["bundled", pytest.param("system", marks=pytest.mark.long)])
def watched(request: pytest.FixtureRequest) -> Iterator[WatchedRedis]:
    """A master and a replica of Redis 6.2 or 7, the former with passwords."""
    executable = BUNDLED if request.param == "bundled" else SYSTEM
    if executable is None:
        pytest.skip("redis-server is not installed")
    with running_watched_redis(
        executable, password="s:e/c@t" if request.param == "bundled" else ""
    ) as watched:
        yield watched


async def until_written(executor: PipeliningExecutor, key: str) -> None:
    """Write until it succeeds. Raises TimeoutError."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            try:
                await executor.execute_command("SET", key, 1)
            except RedisError:
                await asyncio.sleep(0.05)
            else:
                return


async def test_client_follows_the_master_when_it_dies(watched: WatchedRedis) -> None:
    client = connect(watched.url, max_connections=8)
    executor = PipeliningExecutor(client)
    await executor.execute_command("SET", "before", 1)
    old = watched.master
    await client.wait(1, 5000)
    await asyncio.to_thread(old.kill)
    await until_written(executor, "after")
    assert watched.master is not old
    assert await executor.execute_command("GET", "before") == b"1"
    # The dead one comes back as a replica, and nobody takes it for the master.
    await asyncio.to_thread(old.start)
    await until_written(executor, "again")
    assert watched.master is not old
    await client.aclose()


async def test_client_leaves_a_frozen_master(watched: WatchedRedis) -> None:
    clients = [connect(watched.url, max_connections=8) for _ in range(2)]
    executors = [PipeliningExecutor(client) for client in clients]
    for executor in executors:
        await executor.execute_command("SET", "before", 1)
    old = watched.master
    old.freeze()
    await until_written(executors[0], "after")
    old.thaw()
    # This one was idle meanwhile, and its connection to the old master may still be there.
    await until_written(executors[1], "later")
    reader: Redis = redis_client(watched.url)
    async with reader, asyncio.timeout(PATIENCE_SECONDS):
        while await reader.get("later") is None:
            await until_written(executors[1], "later")
            await asyncio.sleep(0.2)
    for client in clients:
        await client.aclose()


async def test_any_sentinel_may_be_missing(watched: WatchedRedis) -> None:
    await asyncio.to_thread(watched.stop_sentinel, 0)
    async with connect(watched.url, max_connections=2) as client:
        assert await client.ping()


def test_background_jobs_leave_a_frozen_master() -> None:
    watched = WatchedRedis()
    with running_stack(redis=watched) as stack:
        stack.start_jobs()
        stack.start_beat()

        def drains(number: int) -> None:
            record = usage_record(number)
            with blocking_redis_client(watched.url, socket_timeout=5) as client:
                stream = keys.usage(keys.bucket_of(record.tenant_id))
                client.xadd(stream, {"u": encode_usage(record)})
                wait_until(
                    lambda: client.xlen(stream) == 0, seconds=DRAIN_SECONDS, what="the drain"
                )

        drains(1)
        old = watched.master
        old.freeze()
        watched.await_failover(old)
        # The frozen one closes no connection, and says nothing.
        drains(2)
        old.thaw()
        drains(3)
