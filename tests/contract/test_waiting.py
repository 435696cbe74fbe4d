"""Waits of jobs and numbers of waiting tenants, as gateways and workers get them."""

import pytest
from redis.asyncio import Redis

from contract import keys
from contract.queue import EnqueueResult, JobQueue, LeaseReport, RequeueResult
from contract.tier import ServiceTier
from tests.contract.test_queue import LEASE_MS, MODEL, PLENTY, claim_ids, enqueue, job
from tests.gateway.limits.building import TestClock

PAUSE_SECONDS = 7


@pytest.fixture
def queue(any_redis: "Redis", clock: TestClock) -> JobQueue:
    """An empty queue."""
    return JobQueue(any_redis, MODEL)


async def arrivals(queue: JobQueue) -> list[bytes]:
    """Return the ids of the jobs with a stored arrival, oldest first."""
    found: list[bytes] = await queue._executor.execute_command(
        "ZRANGE", keys.arrivals(MODEL), 0, -1
    )
    return found


async def waiting(queue: JobQueue) -> tuple[int, float]:
    """Return how many tenants wait, and how many seconds the oldest job has waited."""
    status = await queue.status()
    return status.waiting_tenants, status.oldest_wait_seconds


async def test_an_empty_queue_has_no_wait(queue: JobQueue) -> None:
    assert await waiting(queue) == (0, 0.0)


async def test_wait_is_that_of_the_oldest_job_of_all_tenants_and_tiers(
    queue: JobQueue, clock: TestClock
) -> None:
    await enqueue(queue, job("old", "b", service_tier=ServiceTier.FLEX))
    await clock.advance(1000 * PAUSE_SECONDS)
    await enqueue(queue, job("urgent", "a", service_tier=ServiceTier.PRIORITY), job("more", "a"))
    assert await waiting(queue) == (2, PAUSE_SECONDS)
    await claim_ids(queue)
    assert await waiting(queue) == (0, 0.0)
    assert await arrivals(queue) == []


async def test_claim_returns_the_wait_of_the_job(queue: JobQueue, clock: TestClock) -> None:
    await enqueue(queue, job("j1"))
    await clock.advance(1000 * PAUSE_SECONDS)
    await enqueue(queue, job("j2"))
    claimed = await queue.claim("w1", PLENTY, most_jobs=10, lease_ms=LEASE_MS)
    waits = {claim.job.id: claim.waited_seconds for claim in claimed.claims}
    assert waits == {"j1": PAUSE_SECONDS, "j2": 0}


async def test_wait_of_a_returned_job_starts_again(queue: JobQueue, clock: TestClock) -> None:
    await enqueue(queue, job("j1"))
    await clock.advance(1000 * PAUSE_SECONDS)
    assert await claim_ids(queue) == ["j1"]
    requeued = await queue.requeue(job("j1"), 1, is_returned=True)
    assert requeued is RequeueResult.REQUEUED
    assert await waiting(queue) == (1, 0)
    await queue.revive(job("j1"), weight=1.0, attempt=1)
    assert await arrivals(queue) == [b"j1"]
    assert await claim_ids(queue) == ["j1"]
    assert await arrivals(queue) == []


async def test_jobs_that_are_cancelled_or_shed_wait_no_longer(queue: JobQueue) -> None:
    await enqueue(queue, job("j1"), job("j2"))
    await queue.cancel("j1", "a")
    assert await arrivals(queue) == [b"j2"]
    await queue.cancel("j2", "a")
    await enqueue(queue, job("low", service_tier=ServiceTier.FLEX))
    report = await queue.enqueue(
        [job("high", "b", service_tier=ServiceTier.PRIORITY)],
        weight=1.0,
        most_waiting=1,
        most_waiting_of_tenant=1,
        longest_wait_seconds=60.0,
    )
    assert report.result is EnqueueResult.ENQUEUED
    assert len(report.shed) == 1
    assert await arrivals(queue) == [b"high"]


async def test_arrivals_of_expired_jobs_do_not_count(queue: JobQueue, any_redis: "Redis") -> None:
    await any_redis.zadd(keys.arrivals(MODEL), {"expired": 2})
    await enqueue(queue, job("j1"))
    assert await waiting(queue) == (1, 0)
    assert await arrivals(queue) == [b"j1"]


async def test_job_without_arrival_is_claimed_with_an_unknown_wait(
    queue: JobQueue, any_redis: "Redis"
) -> None:
    await enqueue(queue, job("j1"))
    await any_redis.delete(keys.arrivals(MODEL))
    (claim,) = (await queue.claim("w1", PLENTY, most_jobs=1, lease_ms=LEASE_MS)).claims
    assert claim.waited_seconds is None
    assert await queue.finish("w1", LeaseReport("j1", 1, 1))
