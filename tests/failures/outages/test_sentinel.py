"""Clients of a Redis with Sentinel: they follow the master."""

import asyncio

import pytest
from redis.asyncio import Redis
from redis.exceptions import RedisError

from common.redis_url import redis_client
from contract import keys
from gateway.platform.redis_client import MeasuredConnection, connect
from gateway.records.usage_record import encode_usage
from tests.support.patience import PATIENCE_SECONDS
from tests.support.sentinels import WatchedRedis
from tests.support.usage import usage_record


async def until_written(executor: MeasuredConnection, key: str) -> None:
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
    await asyncio.to_thread(watched.await_replica)
    client = connect(watched.url, max_connections=8)
    executor = MeasuredConnection(client)
    await executor.execute_command("SET", "before", 1)
    old = watched.master
    while not await client.wait(1, 1000):
        pass
    await asyncio.to_thread(old.kill)
    await asyncio.gather(
        asyncio.to_thread(watched.await_failover, old), until_written(executor, "after")
    )
    assert watched.master is not old
    assert await executor.execute_command("GET", "before") == b"1"
    # The old master comes back as a replica, and no client takes it for the master.
    await asyncio.to_thread(old.start)
    await until_written(executor, "again")
    assert watched.master is not old
    await client.aclose()


@pytest.mark.slow
@pytest.mark.usefixtures("frozen_redis_is_left")
async def test_clients_and_background_jobs_abandon_a_frozen_master(watched: WatchedRedis) -> None:
    await asyncio.to_thread(watched.await_replica)
    clients = [connect(watched.url, max_connections=8) for _ in range(2)]
    executors = [MeasuredConnection(client) for client in clients]
    for executor in executors:
        await executor.execute_command("SET", "before", 1)
    await drained(watched, 1)
    old = watched.master
    # It closes no connection, and sends nothing.
    old.freeze()
    await asyncio.gather(
        asyncio.to_thread(watched.await_failover, old), until_written(executors[0], "after")
    )
    await drained(watched, 2)
    old.thaw()
    # The second client was idle meanwhile, and may still have its connection to the old master.
    await asyncio.gather(drained(watched, 3), until_written(executors[1], "later"))
    reader: Redis = redis_client(watched.url)
    async with reader, asyncio.timeout(PATIENCE_SECONDS):
        while await reader.get("later") is None:
            await until_written(executors[1], "later")
            await asyncio.sleep(0.2)
    for client in clients:
        await client.aclose()


async def drained(watched: WatchedRedis, number: int) -> None:
    """Write a record of usage to Redis, and wait until it is in the ledger."""
    record = usage_record(number)
    stream = keys.usage(keys.bucket_of(record.tenant_id))
    async with redis_client(watched.url) as client, asyncio.timeout(PATIENCE_SECONDS):
        await client.xadd(stream, {"u": encode_usage(record)})
        while await client.xlen(stream):
            await asyncio.sleep(0.1)


async def test_any_sentinel_may_be_missing(watched: WatchedRedis) -> None:
    """The last test here: the others need all sentinels."""
    await asyncio.to_thread(watched.stop_sentinel, 0)
    async with connect(watched.url, max_connections=2) as client:
        assert await client.ping()
