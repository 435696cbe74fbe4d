"""Service tiers: the order of a tenant's jobs, and the shares of tenants."""

import pytest
from redis.asyncio import Redis

from contract import keys, messages
from contract.queue import EnqueueResult, JobQueue, LeaseReport, RequeueResult
from contract.tier import TIER_BOOSTS, TIER_RANKS, Lane, ServiceTier
from tests.contract.test_queue import LEASE_MS, MODEL, PLENTY, claim_ids, enqueue, job

FLEX, DEFAULT, PRIORITY = ServiceTier.FLEX, ServiceTier.DEFAULT, ServiceTier.PRIORITY
BATCH = ServiceTier.BATCH


@pytest.fixture
def queue(any_redis: "Redis") -> JobQueue:
    """An empty queue."""
    return JobQueue(any_redis, MODEL)


def test_every_tier_has_a_unique_rank_and_a_boost() -> None:
    ordered = [PRIORITY, DEFAULT, FLEX, BATCH]
    assert sorted(TIER_RANKS, key=lambda tier: TIER_RANKS[tier]) == ordered
    assert len(set(TIER_RANKS.values())) == len(ServiceTier)
    assert set(TIER_BOOSTS) == set(ServiceTier)
    assert TIER_BOOSTS[DEFAULT] == 1


def test_job_of_a_process_without_tiers_has_the_default_one() -> None:
    plain = messages.encode(job("j1"))
    assert b"service_tier" not in plain
    assert messages.decode_job(plain).service_tier is DEFAULT
    urgent = messages.decode_job(messages.encode(job("j1", service_tier=PRIORITY)))
    assert urgent.service_tier is PRIORITY


async def test_jobs_of_a_tenant_are_ordered_by_tier_and_age(queue: JobQueue) -> None:
    for number, tier in enumerate([FLEX, DEFAULT, PRIORITY, FLEX, DEFAULT, PRIORITY]):
        await enqueue(queue, job(f"{tier}-{number}", service_tier=tier))
    assert await claim_ids(queue) == [
        "priority-2",
        "priority-5",
        "default-1",
        "default-4",
        "flex-0",
        "flex-3",
    ]


async def test_jobs_of_one_request_keep_their_order(queue: JobQueue) -> None:
    ids = [f"j{i}" for i in range(20)]
    await enqueue(queue, *(job(job_id, service_tier=FLEX) for job_id in ids))
    assert await claim_ids(queue) == ids


async def test_lost_job_returns_to_the_head_of_its_tier(queue: JobQueue) -> None:
    await enqueue(queue, job("first"), job("second"))
    assert await claim_ids(queue, most_jobs=1) == ["first"]
    await enqueue(queue, job("third"))
    await enqueue(queue, job("urgent", service_tier=PRIORITY))
    await enqueue(queue, job("patient", service_tier=FLEX))
    await queue.extend("w1", [LeaseReport("first", 1, 0)], lease_ms=0)
    assert await queue.requeue(job("first"), 1) is RequeueResult.REQUEUED
    assert await claim_ids(queue) == ["urgent", "first", "second", "third", "patient"]


@pytest.mark.parametrize(("tier", "first"), [(PRIORITY, 20), (DEFAULT, 15), (FLEX, 10)])
async def test_a_tier_changes_a_tenants_share_and_starves_nobody(
    queue: JobQueue, tier: ServiceTier, first: int
) -> None:
    await enqueue(queue, *(job(f"a{i}", "a", service_tier=tier) for i in range(40)))
    await enqueue(queue, *(job(f"b{i}", "b") for i in range(40)))
    claimed = await claim_ids(queue, most_jobs=30)
    assert sum(job_id.startswith("a") for job_id in claimed) == first


async def test_each_job_is_charged_by_its_own_tier(queue: JobQueue, any_redis: "Redis") -> None:
    await enqueue(queue, job("j1", prompt_tokens=10, service_tier=PRIORITY), weight=3.0)
    await enqueue(queue, job("j2", prompt_tokens=30, service_tier=FLEX), weight=3.0)
    await claim_ids(queue, most_jobs=1)
    await queue.finish("w1", LeaseReport("j1", 1, 10, 10))
    assert float(await any_redis.hget(keys.service_counters(MODEL), "a") or 0) == pytest.approx(
        (10 + 2 * 10) / 6
    )
    await claim_ids(queue)
    assert float(await any_redis.hget(keys.service_counters(MODEL), "a") or 0) == pytest.approx(
        30 / 6 + 30 / 1.5
    )


async def test_batch_jobs_are_claimed_only_when_nothing_else_waits(queue: JobQueue) -> None:
    await enqueue(queue, job("line", "a", service_tier=BATCH), weight=9.0)
    await enqueue(queue, *(job(f"flex-{i}", "b", service_tier=FLEX) for i in range(3)))
    claimed = (await queue.claim("w1", PLENTY, most_jobs=2, lease_ms=LEASE_MS)).claims
    assert [claim.job.id for claim in claimed] == ["flex-0", "flex-1"]
    claimed = (await queue.claim("w1", PLENTY, most_jobs=2, lease_ms=LEASE_MS)).claims
    assert [(claim.job.id, claim.is_preemptible) for claim in claimed] == [
        ("flex-2", False),
        ("line", True),
    ]


async def test_requests_get_the_room_of_batch_jobs_which_get_none_of_it(queue: JobQueue) -> None:
    await enqueue(queue, job("line", service_tier=BATCH))
    room = PLENTY._replace(sequences=0, preemptible_sequences=1)
    result = await queue.claim("w1", room, most_jobs=9, lease_ms=LEASE_MS)
    assert (result.claims, result.blocked) == ([], Lane.BATCH)
    # The only batch job that runs may be replaced, so requests have the whole engine.
    small = room._replace(tokens=0, empty=True)
    await enqueue(queue, job("request", prompt_tokens=99))
    assert await claim_ids(queue, room=small) == ["request"]
    assert await claim_ids(queue, room=room._replace(sequences=1)) == ["line"]


async def test_waiting_batch_jobs_take_no_place_of_requests(queue: JobQueue) -> None:
    lines = [job(f"line-{i}", service_tier=BATCH) for i in range(3)]
    assert await enqueue(queue, *lines, most_waiting=3) is EnqueueResult.ENQUEUED
    assert await enqueue(queue, job("request"), most_waiting=1) is EnqueueResult.ENQUEUED
    more = job("line-3", service_tier=BATCH)
    assert await enqueue(queue, more, most_waiting=3) is EnqueueResult.MODEL_FULL
    status = await queue.status()
    assert (status.waiting_jobs, status.waiting_batch_jobs) == (1, 3)


async def test_promoted_job_counts_as_a_request(queue: JobQueue) -> None:
    lines = [job(f"line-{i}", service_tier=BATCH) for i in range(2)]
    await enqueue(queue, *lines)
    assert await claim_ids(queue, most_jobs=1) == ["line-0"]
    ids = [each.id for each in lines]
    assert await queue.promote([*ids, "unknown"], "a", FLEX) == 2
    assert await queue.promote(ids, "a", FLEX) == 0
    await enqueue(queue, job("flex", service_tier=FLEX))
    # It was leased; the gateway that requeues it does not know its new tier.
    assert await queue.requeue(lines[0], 1, is_returned=True) is RequeueResult.REQUEUED
    claims = (await queue.claim("w1", PLENTY, most_jobs=9, lease_ms=LEASE_MS)).claims
    assert [claim.job.id for claim in claims] == ["line-0", "line-1", "flex"]
    assert not any(claim.is_preemptible for claim in claims)
