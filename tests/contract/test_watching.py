"""Workers that are gone: their jobs' leases expire at once."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
from redis.asyncio import Redis

from contract import keys
from contract.messages import WorkerCard, WorkerState
from contract.queue import MISSING_MS, JobQueue, LeaseReport
from tests.contract.test_queue import LEASE_MS, MODEL, claim_ids, enqueue, job
from tests.gateway.limits.building import TestClock
from tests.support.kinds import every_redis
from tests.support.redis_server import RedisServer

WORKER_LEASE_MS = 1_500


@pytest.fixture
def queue(any_redis: "Redis") -> JobQueue:
    """An empty queue."""
    return JobQueue(any_redis, MODEL)


@pytest.fixture
async def connection(any_redis_server: RedisServer) -> AsyncIterator[AsyncExitStack]:
    """The connection of worker w1 to its channel; closing the stack closes it."""
    async with AsyncExitStack() as exits:
        client = await exits.enter_async_context(Redis.from_url(any_redis_server.url))
        subscription = await exits.enter_async_context(client.pubsub())
        await subscription.subscribe(keys.worker_channel(MODEL, "w1"))
        assert await subscription.get_message(timeout=10)
        yield exits


async def beat(queue: JobQueue, lease_ms: int = WORKER_LEASE_MS) -> bool:
    return await queue.beat("w1", lease_ms=lease_ms)


async def hold(queue: JobQueue) -> None:
    """Let w1 and w2 hold a job each."""
    card = WorkerCard(
        id="w1", model=MODEL, state=WorkerState.READY, engine="e", created=0, context_window=9
    )
    await queue.announce(card, ttl_ms=60_000)
    await enqueue(queue, job("j1"), job("j2"))
    for worker in ("w1", "w2"):
        await claim_ids(queue, worker, most_jobs=1)


@every_redis
async def test_jobs_of_a_disconnected_worker_are_lost_after_a_grace_period(
    clock: TestClock, queue: JobQueue, connection: AsyncExitStack
) -> None:
    await hold(queue)
    assert await beat(queue)
    assert await queue.gone_workers() == []
    await connection.aclose()
    await until_disconnected(queue)
    assert await queue.gone_workers() == []
    await clock.advance(MISSING_MS - 1)
    assert await queue.gone_workers() == []
    assert await queue.reclaim() == []
    assert (await queue.status()).ready_workers == 1
    await clock.advance(1)
    assert await queue.gone_workers() == ["w1"]
    assert [lost.job_id for lost in await queue.reclaim()] == ["j1"]
    assert (await queue.status()).ready_workers == 0
    assert await queue.gone_workers() == []


async def until_disconnected(queue: JobQueue) -> None:
    channel = keys.worker_channel(MODEL, "w1")
    while (await queue._executor.execute_command("PUBSUB", "NUMSUB", channel))[1]:
        pass


@pytest.mark.usefixtures("connection")
async def test_heartbeat_keeps_a_worker_whose_lease_has_expired(
    clock: TestClock, queue: JobQueue
) -> None:
    """As after a pause of Redis, which may process heartbeats after a gateway's call."""
    await hold(queue)
    assert await beat(queue)
    await clock.advance(10 * WORKER_LEASE_MS)
    assert await queue.gone_workers() == []
    assert await beat(queue)
    await clock.advance(WORKER_LEASE_MS - 1)
    assert await queue.gone_workers() == []
    assert await queue.reclaim() == []
    await clock.advance(1)
    assert await queue.gone_workers() == []
    await clock.advance(MISSING_MS)
    assert await queue.gone_workers() == ["w1"]
    # A worker that returns before its gateway has decided keeps the job.
    assert await queue.extend("w1", [LeaseReport("j1", 1, 3)], lease_ms=LEASE_MS) == []
    assert await queue.reclaim() == []


async def test_worker_without_a_connection_or_lease_is_not_watched(
    clock: TestClock, queue: JobQueue, connection: AsyncExitStack
) -> None:
    await hold(queue)
    assert await beat(queue)
    assert not await beat(queue, lease_ms=0)
    assert await beat(queue)
    await connection.aclose()
    await until_disconnected(queue)
    assert not await beat(queue)
    await clock.advance(10 * WORKER_LEASE_MS)
    for _ in range(2):
        assert await queue.gone_workers() == []
        await clock.advance(MISSING_MS)
    assert await queue.reclaim() == []
