"""A full queue: which jobs are shed, which requests are refused, and their retry times."""

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from redis.asyncio import Redis

from contract import keys
from contract.queue import EnqueueResult, JobQueue, LeaseReport, RequeueResult, ShedJob
from contract.tier import ServiceTier
from tests.contract.test_queue import MODEL, admit, claim_ids, enqueue, job, text
from tests.gateway.limits.building import TestClock

FLEX, DEFAULT, PRIORITY = ServiceTier.FLEX, ServiceTier.DEFAULT, ServiceTier.PRIORITY


@pytest.fixture
def queue(any_redis: "Redis", clock: TestClock) -> JobQueue:
    """An empty queue."""
    return JobQueue(any_redis, MODEL)


async def sheddable(redis: "Redis") -> dict[str, int]:
    """Return how many jobs could be shed, by `RANK TENANT`."""
    rows: Any = await redis.zrange(keys.sheddable(MODEL), 0, -1, withscores=True)
    return {text(member): int(score) % 2**40 for member, score in rows}


async def fill(queue: JobQueue, tenant: str, tier: ServiceTier, number: int) -> None:
    """Enqueue jobs whose names have tenant, tier and order."""
    for i in range(number):
        handle = ord(tenant) * 1000 + i
        sent = job(f"{tenant}-{tier}-{i}", tenant, service_tier=tier, handle=handle)
        assert await enqueue(queue, sent) is EnqueueResult.ENQUEUED


async def test_a_full_queue_sheds_the_newest_of_the_lowest_tier_for_a_higher_one(
    queue: JobQueue,
) -> None:
    await fill(queue, "a", FLEX, 2)
    await fill(queue, "a", DEFAULT, 2)
    report = await admit(queue, job("new", "b", service_tier=PRIORITY), most_waiting=4)
    assert report.result is EnqueueResult.ENQUEUED
    assert report.shed == [ShedJob("gw-1", ord("a") * 1000 + 1)]
    assert report.waiting_jobs == (await queue.status()).waiting_jobs == 4
    assert sorted(await claim_ids(queue)) == ["a-default-0", "a-default-1", "a-flex-0", "new"]


async def test_lowest_tier_is_shed_first_whatever_its_tenant(queue: JobQueue) -> None:
    await fill(queue, "a", DEFAULT, 5)
    await fill(queue, "b", FLEX, 1)
    for number, left in ((1, {"1 a": 5, "0 c": 1}), (2, {"1 a": 4, "0 c": 2})):
        sent = job(f"new-{number}", "c", service_tier=PRIORITY)
        report = await admit(queue, sent, most_waiting=6)
        assert (report.result, len(report.shed)) == (EnqueueResult.ENQUEUED, 1)
        assert await sheddable(queue._executor) == left  # type: ignore[arg-type]


async def test_tenant_with_most_waiting_jobs_of_a_tier_is_shed(queue: JobQueue) -> None:
    await fill(queue, "a", FLEX, 2)
    await fill(queue, "b", FLEX, 5)
    await fill(queue, "c", FLEX, 3)
    five = [job(f"new-{i}", "d") for i in range(5)]
    report = await admit(queue, *five, most_waiting=10)
    assert report.result is EnqueueResult.ENQUEUED
    # Down from the top: b falls to c's level, and both to a's.
    left = sorted(job_id for job_id in await claim_ids(queue) if "flex" in job_id)
    assert len(left) == 5
    assert {name[0]: sum(each[0] == name[0] for each in left) for name in left} in (
        {"a": 2, "b": 2, "c": 1},
        {"a": 2, "b": 1, "c": 2},
        {"a": 1, "b": 2, "c": 2},
    )


@pytest.mark.parametrize(
    ("waiting", "arriving", "limits", "expected"),
    [
        (FLEX, FLEX, {"most_waiting": 3}, EnqueueResult.MODEL_FULL),
        (PRIORITY, DEFAULT, {"most_waiting": 3}, EnqueueResult.MODEL_FULL),
        (DEFAULT, DEFAULT, {"most_waiting_of_tenant": 3}, EnqueueResult.TENANT_FULL),
        (PRIORITY, FLEX, {"most_waiting_of_tenant": 3}, EnqueueResult.TENANT_FULL),
    ],
)
async def test_no_job_is_shed_for_an_equal_or_lower_tier(
    queue: JobQueue,
    waiting: ServiceTier,
    arriving: ServiceTier,
    limits: dict[str, int],
    expected: EnqueueResult,
) -> None:
    await fill(queue, "a", waiting, 3)
    report = await admit(queue, job("new", "a", service_tier=arriving), **limits)
    assert (report.result, report.shed) == (expected, [])
    assert len(await claim_ids(queue)) == 3


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({"most_waiting": 6}, EnqueueResult.MODEL_FULL),
        ({"most_waiting_of_tenant": 3}, EnqueueResult.TENANT_FULL),
        ({"most_waiting": 7, "most_waiting_of_tenant": 4}, EnqueueResult.TENANT_FULL),
    ],
)
async def test_nothing_is_shed_for_a_request_that_still_does_not_fit(
    queue: JobQueue, limits: dict[str, int], expected: EnqueueResult
) -> None:
    await fill(queue, "a", FLEX, 1)
    await fill(queue, "a", DEFAULT, 2)
    await fill(queue, "b", DEFAULT, 2)
    await fill(queue, "b", FLEX, 1)
    three = [job(f"new-{i}", "a") for i in range(3)]
    report = await admit(queue, *three, **limits)
    assert (report.result, report.shed) == (expected, [])
    assert (await queue.status()).waiting_jobs == 6


async def test_a_tenants_own_full_queue_sheds_its_own_lower_tiers_only(queue: JobQueue) -> None:
    await fill(queue, "a", FLEX, 2)
    await fill(queue, "b", FLEX, 5)
    two = [job(f"new-{i}", "a", service_tier=PRIORITY) for i in range(2)]
    report = await admit(queue, *two, most_waiting_of_tenant=3)
    assert report.result is EnqueueResult.ENQUEUED
    assert report.shed == [ShedJob("gw-1", ord("a") * 1000 + 1)]
    expected = {"0 a": 2, "2 a": 1, "2 b": 5}
    assert await sheddable(queue._executor) == expected  # type: ignore[arg-type]


async def test_one_request_respects_both_bounds(queue: JobQueue) -> None:
    await fill(queue, "a", FLEX, 2)
    await fill(queue, "b", FLEX, 4)
    two = [job(f"new-{i}", "a") for i in range(2)]
    report = await admit(queue, *two, most_waiting=6, most_waiting_of_tenant=3)
    assert report.result is EnqueueResult.ENQUEUED
    assert len(report.shed) == 2
    assert (await queue.status()).waiting_jobs == 6
    expected = {"1 a": 2, "2 a": 1, "2 b": 3}
    assert await sheddable(queue._executor) == expected  # type: ignore[arg-type]


async def test_a_shed_job_is_unknown_and_its_tenant_leaves_the_order(
    queue: JobQueue, any_redis: "Redis"
) -> None:
    await fill(queue, "a", FLEX, 1)
    report = await admit(queue, job("new", "b"), most_waiting=1)
    assert len(report.shed) == 1
    assert not await any_redis.exists(keys.job(MODEL, "a-flex-0"))
    assert await any_redis.zrange(keys.active_tenants(MODEL), 0, -1) == [b"b"]
    assert not await queue.cancel("a-flex-0", "a")
    assert await claim_ids(queue) == ["new"]


async def test_started_jobs_are_never_shed(clock: TestClock, queue: JobQueue) -> None:
    begun = job("begun", "a", service_tier=FLEX)
    await enqueue(queue, begun)
    await claim_ids(queue)
    await queue.extend("w1", [LeaseReport("begun", 1, 3)], lease_ms=0)
    await clock.advance(5)
    assert await queue.requeue(begun, 1) is RequeueResult.REQUEUED
    urgent = job("new", "b", service_tier=PRIORITY)
    assert (await admit(queue, urgent, most_waiting=1)).result is EnqueueResult.MODEL_FULL

    await fill(queue, "a", FLEX, 1)
    report = await admit(queue, urgent, most_waiting=2)
    assert (report.result, len(report.shed)) == (EnqueueResult.ENQUEUED, 1)
    assert sorted(await claim_ids(queue)) == ["begun", "new"]


async def test_revived_job_can_be_shed_only_if_it_never_started(queue: JobQueue) -> None:
    for attempt, expected in ((1, {}), (0, {"2 a": 1})):
        revived = job(f"j{attempt}", "a", service_tier=FLEX)
        await queue.revive(revived, weight=1.0, attempt=attempt)
        assert await sheddable(queue._executor) == expected  # type: ignore[arg-type]
    # A job that waits in Redis, although its gateway has received tokens.
    await queue.revive(job("j0", "a", service_tier=FLEX), weight=1.0, attempt=1)
    assert await sheddable(queue._executor) == {}  # type: ignore[arg-type]


async def _cancel(queue: JobQueue) -> None:
    assert await queue.cancel("a-default-0", "a")


async def _claim(queue: JobQueue) -> None:
    assert await claim_ids(queue, most_jobs=1) == ["a-default-0"]


async def _expire(queue: JobQueue) -> None:
    await queue._executor.execute_command("DEL", keys.job(MODEL, "a-default-0"))
    assert await claim_ids(queue, most_jobs=1) == ["a-default-1"]


@pytest.mark.parametrize(("leave", "left"), [(_cancel, 2), (_claim, 2), (_expire, 1)])
async def test_jobs_that_leave_the_queue_are_not_counted(
    queue: JobQueue, leave: Callable[[JobQueue], Awaitable[None]], left: int
) -> None:
    await fill(queue, "a", DEFAULT, 3)
    await leave(queue)
    assert await sheddable(queue._executor) == {"1 a": left}  # type: ignore[arg-type]
    await claim_ids(queue)
    assert await sheddable(queue._executor) == {}  # type: ignore[arg-type]


# -- retry times -----------------------------------------------------------------------------------


async def set_pace(
    redis: "Redis", key: str, *, claims: float, seconds: float, calls: float
) -> None:
    """Write a pace as if it had been measured, with calls at equal distances."""
    values: dict[str, float] = {
        "claims": claims,
        "squares": calls * (seconds / calls) ** 2,
        "seconds": seconds,
    }
    await redis.hset(key, mapping=values)  # type: ignore[arg-type]


async def test_no_retry_time_is_given_before_a_pace_was_measured(queue: JobQueue) -> None:
    await fill(queue, "a", DEFAULT, 1)
    assert (await admit(queue, job("j2"), most_waiting=1)).retry_after_seconds is None


async def test_pace_is_measured_only_while_jobs_wait(
    clock: TestClock, queue: JobQueue, any_redis: "Redis"
) -> None:
    await fill(queue, "a", DEFAULT, 8)
    for _ in range(3):
        await claim_ids(queue, most_jobs=2)
        await clock.advance(50)
    pace = {text(k): float(v) for k, v in (await any_redis.hgetall(keys.pace(MODEL))).items()}
    assert pace["claims"] == pytest.approx(4, rel=0.05)
    assert pace["seconds"] == pytest.approx(0.1, rel=0.01)
    # Two intervals of the same length.
    assert pace["squares"] == pytest.approx(pace["seconds"] ** 2 / 2, rel=0.01)
    await claim_ids(queue)
    idle = await any_redis.hgetall(keys.pace(MODEL))
    assert b"at" not in idle
    await clock.advance(100)
    await fill(queue, "b", DEFAULT, 3)
    await claim_ids(queue, most_jobs=1)
    again = await any_redis.hgetall(keys.pace(MODEL))
    assert float(again[b"seconds"]) == pytest.approx(float(idle[b"seconds"]), abs=0.001)


@pytest.mark.parametrize("leave", ["claim", "cancel", "shed"])
async def test_measuring_ends_with_a_tenants_backlog(
    queue: JobQueue, any_redis: "Redis", leave: str
) -> None:
    await fill(queue, "a", FLEX, 2)
    await claim_ids(queue, most_jobs=1)
    assert await any_redis.hexists(keys.tenant_pace.prefix(MODEL) + "a", "at")
    if leave == "claim":
        await claim_ids(queue)
    elif leave == "cancel":
        await queue.cancel("a-flex-1", "a")
    else:
        assert (await admit(queue, job("new", "b"), most_waiting=1)).shed
    assert not await any_redis.hexists(keys.tenant_pace.prefix(MODEL) + "a", "at")
    assert await any_redis.hexists(keys.pace(MODEL), "at") is (leave == "shed")


async def test_refused_requests_get_successive_retry_times(
    queue: JobQueue, any_redis: "Redis"
) -> None:
    await fill(queue, "a", DEFAULT, 2)
    await set_pace(any_redis, keys.pace(MODEL), claims=20, seconds=10, calls=5)
    reported = [
        (await admit(queue, job(f"new-{i}"), most_waiting=2)).retry_after_seconds for i in range(6)
    ]
    # Two claims a second, in calls two seconds apart.
    assert reported == pytest.approx([2.5, 3.0, 3.5, 4.0, 4.5, 5.0], abs=0.2)


async def test_no_promise_is_longer_than_a_minute(queue: JobQueue, any_redis: "Redis") -> None:
    await fill(queue, "a", DEFAULT, 1)
    await set_pace(any_redis, keys.pace(MODEL), claims=1, seconds=50, calls=50)
    for i in range(4):
        report = await admit(queue, job(f"new-{i}"), most_waiting=1)
        assert report.retry_after_seconds is not None
        assert report.retry_after_seconds <= 61.1


async def test_places_are_reserved_for_retries(
    clock: TestClock, queue: JobQueue, any_redis: "Redis"
) -> None:
    await fill(queue, "a", DEFAULT, 6)
    await set_pace(any_redis, keys.pace(MODEL), claims=1000, seconds=10, calls=10)
    reported = (await admit(queue, job("refused"), most_waiting=6)).retry_after_seconds
    assert reported == pytest.approx(1.01, abs=0.01)
    await claim_ids(queue, most_jobs=1)
    # Within the gap between two claims.
    await clock.advance(100)
    early = await admit(queue, job("early"), most_waiting=6)
    assert (early.result, early.waiting_jobs) == (EnqueueResult.MODEL_FULL, 5)
    # Requests that could shed these jobs need not wait for them, nor shed any.
    urgent = await admit(queue, job("urgent", service_tier=PRIORITY), most_waiting=6)
    assert (urgent.result, urgent.shed) == (EnqueueResult.ENQUEUED, [])
    await claim_ids(queue, most_jobs=2)
    now = clock.now_ms
    await any_redis.zadd(keys.promises(MODEL), {"refused 1": now - 10, "early 1": now + 500})
    assert await enqueue(queue, job("retried"), most_waiting=6) is EnqueueResult.ENQUEUED
    assert await any_redis.zrange(keys.promises(MODEL), 0, -1) == [b"early 1"]


async def test_unused_promises_lapse(clock: TestClock, queue: JobQueue, any_redis: "Redis") -> None:
    await fill(queue, "a", DEFAULT, 5)
    await set_pace(any_redis, keys.pace(MODEL), claims=1000, seconds=10, calls=1000)
    now = clock.now_ms
    await any_redis.zadd(keys.promises(MODEL), {"lapsed 1": now - 2500})
    assert await enqueue(queue, job("new"), most_waiting=6) is EnqueueResult.ENQUEUED
    assert not await any_redis.exists(keys.promises(MODEL))


async def test_at_most_half_of_a_queue_is_reserved(
    clock: TestClock, queue: JobQueue, any_redis: "Redis"
) -> None:
    await fill(queue, "a", DEFAULT, 2)
    await set_pace(any_redis, keys.pace(MODEL), claims=10, seconds=10, calls=10)
    now = clock.now_ms
    await any_redis.zadd(keys.promises(MODEL), {f"p{i} 1": now + 500 for i in range(50)})
    results = [(await admit(queue, job(f"new-{i}"), most_waiting=6)).result for i in range(3)]
    assert results == [EnqueueResult.ENQUEUED, EnqueueResult.MODEL_FULL, EnqueueResult.MODEL_FULL]


async def test_retry_time_uses_the_tenants_pace_or_an_equal_share(
    queue: JobQueue, any_redis: "Redis"
) -> None:
    await fill(queue, "a", DEFAULT, 2)
    await fill(queue, "b", DEFAULT, 2)
    await set_pace(any_redis, keys.pace(MODEL), claims=40, seconds=10, calls=1000)
    shared = await admit(queue, job("new-a", "a"), most_waiting_of_tenant=2)
    assert shared.result is EnqueueResult.TENANT_FULL
    assert shared.retry_after_seconds == pytest.approx(1.5, abs=0.1)
    await set_pace(
        any_redis, keys.tenant_pace.prefix(MODEL) + "b", claims=50, seconds=10, calls=1000
    )
    own = await admit(queue, job("new-b", "b"), most_waiting_of_tenant=2)
    assert own.retry_after_seconds == pytest.approx(1.2, abs=0.1)


async def test_shed_requests_get_a_retry_time_too(queue: JobQueue, any_redis: "Redis") -> None:
    await fill(queue, "a", FLEX, 2)
    await set_pace(any_redis, keys.pace(MODEL), claims=20, seconds=10, calls=1000)
    report = await admit(queue, job("new", "b"), most_waiting=2)
    assert len(report.shed) == 1
    assert report.retry_after_seconds == pytest.approx(1.5, abs=0.2)


# -- requests that would wait too long -------------------------------------------------------------


async def test_a_request_that_would_wait_too_long_is_refused(
    queue: JobQueue, any_redis: "Redis"
) -> None:
    await fill(queue, "a", DEFAULT, 10)
    await set_pace(any_redis, keys.pace(MODEL), claims=20, seconds=10, calls=1000)
    report = await admit(queue, job("late"), longest_wait_seconds=4)
    assert report.result is EnqueueResult.TOO_LATE
    assert report.retry_after_seconds == pytest.approx(1.0, abs=0.1)
    assert (await queue.status()).waiting_jobs == 10
    # Other tenants, and its own more urgent jobs, do not wait for the ten.
    assert await enqueue(queue, job("b", "b"), longest_wait_seconds=4) is EnqueueResult.ENQUEUED
    urgent = job("urgent", service_tier=PRIORITY)
    assert await enqueue(queue, urgent, longest_wait_seconds=4) is EnqueueResult.ENQUEUED
    assert await enqueue(queue, job("patient"), longest_wait_seconds=60) is EnqueueResult.ENQUEUED


async def test_briefly_measured_pace_refuses_no_request(
    queue: JobQueue, any_redis: "Redis"
) -> None:
    await fill(queue, "a", DEFAULT, 10)
    await set_pace(any_redis, keys.pace(MODEL), claims=2, seconds=1, calls=2)
    assert await enqueue(queue, job("new"), longest_wait_seconds=1) is EnqueueResult.ENQUEUED


async def test_nothing_is_shed_for_a_request_that_would_wait_too_long(
    queue: JobQueue, any_redis: "Redis"
) -> None:
    await fill(queue, "a", DEFAULT, 5)
    await fill(queue, "a", FLEX, 5)
    await set_pace(any_redis, keys.pace(MODEL), claims=10, seconds=10, calls=1000)
    report = await admit(queue, job("late"), most_waiting=10, longest_wait_seconds=4)
    assert (report.result, report.shed) == (EnqueueResult.TOO_LATE, [])
    assert (await queue.status()).waiting_jobs == 10
