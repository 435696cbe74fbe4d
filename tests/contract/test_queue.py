"""The queue's scripts against real servers."""

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

import pytest
from redis.asyncio import Redis

from common import clock
from contract import keys, messages
from contract import queue as queue_module
from contract.messages import GenerationJob, Resumption, SequenceProgress, WorkerCard, WorkerState
from contract.outcomes import FinishReason
from contract.prompts import packed
from contract.queue import (
    JOBS_AT_ONCE,
    EnqueueReport,
    EnqueueResult,
    JobQueue,
    LeaseReport,
    NextJob,
    RequeueResult,
    Room,
    needed_tokens,
)
from contract.sampling import SamplingSpec
from contract.tier import Lane, ServiceTier
from tests.gateway.limits.building import TestClock
from tests.support.kinds import every_redis

MODEL = "m/with:odd {chars}"
PLENTY = Room(tokens=10**9, sequences=10**6, most_sequences=10**6, empty=False)
LEASE_MS = 60_000


def job(job_id: str, tenant: str = "a", *, prompt_tokens: int = 10, **fields: Any) -> GenerationJob:
    """Make a job; only the fields that the queue reads matter."""
    defaults: dict[str, Any] = {
        "handle": 7,
        "gateway": "gw-1",
        "cache_salt": "salt",
        "max_tokens": 16,
        "sampling": SamplingSpec(seed=1),
        "deadline_ms": clock.now_ms() + 60_000,
    }
    return GenerationJob(
        id=job_id,
        tenant=tenant,
        prompt_token_ids=packed(range(prompt_tokens)),
        **(defaults | fields),
    )


def text(value: Any) -> str:
    """Decode a raw reply."""
    assert isinstance(value, bytes)
    return value.decode()


async def enqueue(
    queue: JobQueue, *jobs: GenerationJob, weight: float = 1.0, **limits: int
) -> EnqueueResult:
    """Enqueue with large limits; nothing may be shed for it."""
    report = await admit(queue, *jobs, weight=weight, **limits)
    assert not report.shed
    return report.result


async def admit(
    queue: JobQueue, *jobs: GenerationJob, weight: float = 1.0, **limits: int
) -> EnqueueReport:
    """Enqueue with large limits, and return the whole result."""
    most = {"most_waiting": 1000, "most_waiting_of_tenant": 1000, "longest_wait_seconds": 3600}
    return await queue.enqueue(jobs, weight=weight, **(most | limits))


async def claim_ids(
    queue: JobQueue, worker: str = "w1", room: Room = PLENTY, most_jobs: int = 100
) -> list[str]:
    """Claim and return the ids in the order they were given out."""
    result = await queue.claim(worker, room, most_jobs=most_jobs, lease_ms=LEASE_MS)
    return [claim.job.id for claim in result.claims]


@pytest.fixture
def queue(any_redis: "Redis") -> JobQueue:
    """An empty queue."""
    return JobQueue(any_redis, MODEL)


async def test_many_jobs_are_enqueued_in_parts_but_all_or_none(queue: JobQueue) -> None:
    jobs = [job(f"j{number}") for number in range(3 * JOBS_AT_ONCE + 1)]
    most = {"most_waiting": len(jobs), "most_waiting_of_tenant": len(jobs)}
    for bound, refusal in (
        ("most_waiting", EnqueueResult.MODEL_FULL),
        ("most_waiting_of_tenant", EnqueueResult.TENANT_FULL),
    ):
        assert await enqueue(queue, *jobs, **most | {bound: len(jobs) - 1}) is refusal
        assert (await queue.status()).waiting_jobs == 0
    report = await admit(queue, *jobs, **most)
    assert (report.result, report.waiting_jobs) == (EnqueueResult.ENQUEUED, len(jobs))
    assert await claim_ids(queue, most_jobs=200) == [each.id for each in jobs]


async def test_other_tasks_run_between_long_prompts(
    queue: JobQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns, began = 0, list[int]()

    def begins(work: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def begin(value: Any) -> Any:
            began.append(turns)
            return work(value)

        return begin

    async def other_task() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    for name in ("encode_job", "decode_job"):
        monkeypatch.setattr(messages, name, begins(getattr(messages, name)))
    monkeypatch.setattr(queue_module, "LONG_PROMPT_TOKENS", 9)
    other = asyncio.create_task(other_task())
    assert await enqueue(queue, *(job(f"j{number}") for number in range(3)))
    assert len(await claim_ids(queue)) == 3
    other.cancel()
    assert len(began) == len(set(began)) == 6


async def test_claim_ends_before_prompts_of_too_many_tokens(
    queue: JobQueue, any_redis: "Redis", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_module, "MOST_CLAIMED_PROMPT_TOKENS", 20)
    await enqueue(queue, *(job(f"j{number}") for number in range(3)))
    assert await claim_ids(queue) == ["j0", "j1"]
    assert await any_redis.llen(keys.doorbell(MODEL)) == 1
    assert await claim_ids(queue) == ["j2"]


async def test_claim_returns_the_job_as_it_was_enqueued(queue: JobQueue) -> None:
    sent = job("j1", logprobs=3, stop=["\n", "é"], n=2, best_of=2)
    assert await enqueue(queue, sent) is EnqueueResult.ENQUEUED

    result = await queue.claim("w1", PLENTY, most_jobs=10, lease_ms=LEASE_MS)

    assert [(claim.job, claim.attempt) for claim in result.claims] == [(sent, 1)]
    assert not result.blocked
    assert (await queue.status())[:3] == (0, 0, 1)


async def test_enqueue_of_a_known_job_changes_nothing(queue: JobQueue) -> None:
    await enqueue(queue, job("j1"))
    assert await enqueue(queue, job("j1")) is EnqueueResult.DUPLICATE
    assert (await queue.status()).waiting_jobs == 1

    await claim_ids(queue)
    assert await enqueue(queue, job("j1")) is EnqueueResult.DUPLICATE


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({"most_waiting": 2}, EnqueueResult.MODEL_FULL),
        ({"most_waiting_of_tenant": 2}, EnqueueResult.TENANT_FULL),
    ],
    ids=["model", "tenant"],
)
async def test_enqueue_beyond_a_bound_takes_no_job_of_the_request(
    queue: JobQueue, limits: dict[str, int], expected: EnqueueResult
) -> None:
    await enqueue(queue, job("j1"))
    assert await enqueue(queue, job("j2"), job("j3"), **limits) is expected
    assert (await queue.status()).waiting_jobs == 1
    assert await enqueue(queue, job("j2"), **limits) is EnqueueResult.ENQUEUED


async def test_requests_of_one_turn_that_have_no_room_together_are_enqueued_one_by_one(
    queue: JobQueue,
) -> None:
    ids = [f"j{number}" for number in range(5)]
    results = await asyncio.gather(*(enqueue(queue, job(each), most_waiting=3) for each in ids))
    taken = [each for each, result in zip(ids, results, strict=True) if result.value == 1]
    assert sorted(each.name for each in results) == ["ENQUEUED"] * 3 + ["MODEL_FULL"] * 2

    again = await asyncio.gather(enqueue(queue, job(taken[0])), enqueue(queue, job("j9")))

    assert list(again) == [EnqueueResult.DUPLICATE, EnqueueResult.ENQUEUED]
    assert sorted(await claim_ids(queue)) == [*taken, "j9"]


@every_redis
async def test_two_workers_claiming_at_once_share_the_jobs(
    any_redis_server: Any, queue: JobQueue
) -> None:
    ids = [f"j{i}" for i in range(200)]
    await enqueue(queue, *(job(i) for i in ids))
    others = [Redis.from_url(any_redis_server.url) for _ in range(2)]
    queues = [JobQueue(client, MODEL) for client in others]

    taken = await asyncio.gather(
        *(claim_ids(queues[i % 2], f"w{i % 2}", most_jobs=7) for i in range(40))
    )

    assert sorted(itertools.chain(*taken)) == sorted(ids)
    assert (await queue.status())[:3] == (0, 0, 200)
    for client in others:
        await client.aclose()


async def test_claim_stops_at_the_first_job_without_room(queue: JobQueue) -> None:
    await enqueue(queue, job("big", "a", prompt_tokens=500, max_tokens=100))
    await enqueue(queue, job("small", "b", prompt_tokens=1, max_tokens=1))
    room = Room(tokens=599, sequences=10, most_sequences=10, empty=False)

    result = await queue.claim("w1", room, most_jobs=10, lease_ms=LEASE_MS)

    assert (result.claims, result.blocked) == ([], Lane.REQUESTS)
    # The next idle worker is woken instead.
    assert await queue._executor.execute_command("LLEN", keys.doorbell(MODEL)) >= 1
    assert await claim_ids(queue, room=room._replace(tokens=602)) == ["big", "small"]


async def test_full_worker_learns_of_tenants_that_begin_to_wait_and_claims_for_one(
    queue: JobQueue, any_redis: "Redis"
) -> None:
    full = PLENTY._replace(sequences=0)
    await enqueue(queue, job("j1", "a", prompt_tokens=20), job("j2", "a"), weight=2.0)
    await enqueue(queue, job("j3", "b", prompt_tokens=2_000, n=2, best_of=2))
    result = await queue.claim("w1", full, most_jobs=10, lease_ms=LEASE_MS)
    assert result.next_jobs == [
        NextJob("a", 2.0, 20 + 16, 1),
        NextJob("b", 1.0, 2_000 + 2 * 16, 2),
    ]
    result = await queue.claim("w2", PLENTY, most_jobs=1, lease_ms=LEASE_MS, only="b")
    assert [each.job.id for each in result.claims] == ["j3"]
    # The counter of this tenant exceeds the lowest one by the quantum.
    await enqueue(queue, job("j4", "b", prompt_tokens=100))
    own = keys.worker_doorbell(MODEL, "w1")
    assert await any_redis.llen(own) == 1
    assert not await any_redis.exists(keys.full_workers(MODEL))
    await queue.charge("w2", "j3", 1, 100.0)
    result = await queue.claim("w1", full, most_jobs=10, lease_ms=LEASE_MS)
    assert [each.tenant for each in result.next_jobs] == ["a"]
    for tenant in ("b", "c"):
        result = await queue.claim("w2", PLENTY, most_jobs=1, lease_ms=LEASE_MS, only=tenant)
        assert not result.claims
    # Batch jobs preempt nobody.
    assert await claim_ids(queue, "w2") == ["j1", "j2", "j4"]
    await enqueue(queue, job("j5", service_tier=ServiceTier.BATCH))
    result = await queue.claim("w1", full, most_jobs=10, lease_ms=LEASE_MS)
    assert (result.blocked, result.next_jobs) == (Lane.BATCH, [])


async def test_empty_engine_claims_a_job_larger_than_its_room(queue: JobQueue) -> None:
    await enqueue(queue, job("huge", prompt_tokens=1000), job("next", prompt_tokens=1000))
    room = Room(tokens=10, sequences=1, most_sequences=1, empty=True)
    result = await queue.claim("w1", room, most_jobs=10, lease_ms=LEASE_MS)
    assert [claim.job.id for claim in result.claims] == ["huge"]
    assert result.blocked


async def test_size_of_a_job_with_many_sequences_is_bounded(
    queue: JobQueue,
) -> None:
    await enqueue(queue, job("wide", n=128, best_of=128, max_tokens=1))
    room = Room(tokens=10**6, sequences=15, most_sequences=16, empty=False)
    assert (await queue.claim("w1", room, most_jobs=1, lease_ms=LEASE_MS)).blocked
    assert await claim_ids(queue, room=room._replace(sequences=16)) == ["wide"]


async def test_doorbell_rings_while_jobs_wait(queue: JobQueue, any_redis: "Redis") -> None:
    bell = keys.doorbell(MODEL)
    await enqueue(queue, job("j1"), job("j2"))
    assert await any_redis.llen(bell) == 1

    await any_redis.lpop(bell)
    await claim_ids(queue, most_jobs=1)
    assert await any_redis.llen(bell) == 1, "a job is left: a worker must be woken"

    await claim_ids(queue)
    assert await any_redis.llen(bell) == 0


async def test_tenants_take_turns_by_received_service(queue: JobQueue) -> None:
    await enqueue(queue, *(job(f"a{i}", "a", prompt_tokens=100) for i in range(4)))
    await enqueue(queue, *(job(f"b{i}", "b", prompt_tokens=200) for i in range(4)))
    order = [(await claim_ids(queue, most_jobs=1))[0] for _ in range(6)]
    # a: 100, b: 200, a: 200, then b and a are level again.
    assert order == ["a0", "b0", "a1", "a2", "b1", "a3"]


async def test_a_tenant_with_twice_the_weight_is_served_twice_as_much(queue: JobQueue) -> None:
    await enqueue(queue, *(job(f"a{i}", "a") for i in range(30)), weight=2.0)
    await enqueue(queue, *(job(f"b{i}", "b") for i in range(30)), weight=1.0)
    first = await claim_ids(queue, most_jobs=30)
    assert sum(i.startswith("a") for i in first) == 20


async def test_generated_tokens_count_twice_and_only_once(
    queue: JobQueue, any_redis: "Redis"
) -> None:
    await enqueue(queue, job("j1", prompt_tokens=10))
    await claim_ids(queue)
    for total in (5, 5, 8):
        assert await queue.extend("w1", [LeaseReport("j1", 1, total)], lease_ms=LEASE_MS) == []
    assert await any_redis.hget(keys.service_counters(MODEL), "a") == b"26"
    assert await queue.finish("w1", LeaseReport("j1", 1, 9))
    assert await any_redis.hget(keys.service_counters(MODEL), "a") == b"28"
    assert not await queue.finish("w1", LeaseReport("j1", 1, 90))
    assert await any_redis.hget(keys.service_counters(MODEL), "a") == b"28"


async def test_idle_time_earns_no_credit(queue: JobQueue) -> None:
    await enqueue(queue, *(job(f"a{i}", "a", prompt_tokens=1000) for i in range(4)))
    await claim_ids(queue, most_jobs=3)
    # b was never seen; it is lifted to a's 3000 instead of starting at 0.
    await enqueue(queue, *(job(f"b{i}", "b", prompt_tokens=1000) for i in range(4)))
    assert await claim_ids(queue, most_jobs=3) == ["a3", "b0", "b1"]


async def test_new_tenant_gets_the_counter_of_the_last_one_if_none_waits(
    queue: JobQueue, any_redis: "Redis"
) -> None:
    await enqueue(queue, job("a0", "a", prompt_tokens=500))
    await claim_ids(queue)
    await enqueue(queue, job("b0", "b"))
    assert await any_redis.zscore(keys.active_tenants(MODEL), "b") == 500


async def test_only_the_holder_can_extend_or_finish(queue: JobQueue) -> None:
    await enqueue(queue, job("j1"))
    await claim_ids(queue, "w1")
    assert await queue.extend("w2", [LeaseReport("j1", 1, 3)], lease_ms=LEASE_MS) == ["j1"]
    assert await queue.extend("w1", [LeaseReport("j1", 2, 3)], lease_ms=LEASE_MS) == ["j1"]
    assert not await queue.finish("w2", LeaseReport("j1", 1, 3))
    assert await queue.extend("w1", [LeaseReport("j1", 1, 3)], lease_ms=LEASE_MS) == []


async def test_cancel_of_a_waiting_job_leaves_no_keys(queue: JobQueue, any_redis: "Redis") -> None:
    await enqueue(queue, job("j1"), job("j2"))
    assert await queue.cancel("j1", "a")
    assert not await queue.cancel("j1", "a")
    assert await claim_ids(queue) == ["j2"]
    assert await queue.finish("w1", LeaseReport("j2", 1, 0))
    await queue.forget(["j2"])
    assert (await queue.status())[:3] == (0, 0, 0)
    left = {text(key) for key in await any_redis.keys()}
    # The remaining keys do not grow: the order's memory, a counter of jobs, and the number 0.
    assert left == {
        keys.service_counters(MODEL),
        keys.last_active(MODEL),
        keys.sequence(MODEL),
        keys.waiting(MODEL),
    }


async def test_cancel_of_the_last_waiting_job_takes_its_tenant_out_of_the_order(
    queue: JobQueue, any_redis: "Redis"
) -> None:
    await enqueue(queue, job("j1", "a"))
    await queue.cancel("j1", "a")
    assert await any_redis.zcard(keys.active_tenants(MODEL)) == 0
    assert await any_redis.get(keys.last_active(MODEL)) == b"a"


async def test_cancel_of_a_leased_job_notifies_its_worker(
    queue: JobQueue, any_redis: "Redis"
) -> None:
    await enqueue(queue, job("j1"))
    await claim_ids(queue, "w1")
    assert await queue.cancel("j1", "a")
    assert await any_redis.lrange(keys.control(MODEL, "w1"), 0, -1) == [b"j1"]
    # In case the control list is lost, the worker also gets it as the reply to its next report.
    assert await queue.extend("w1", [LeaseReport("j1", 1, 3)], lease_ms=LEASE_MS) == ["j1"]
    assert await queue.cancel("j1", "a")
    assert await any_redis.llen(keys.control(MODEL, "w1")) == 1
    assert await any_redis.pttl(keys.control(MODEL, "w1")) > 0, "its worker may be gone"
    assert await queue.finish("w1", LeaseReport("j1", 1, 3))
    assert not await queue.cancel("j1", "a")
    assert (await queue.status()).leased_jobs == 0


async def lose(queue: JobQueue, attempt: int = 1) -> None:
    """Expire the lease of j1."""
    await queue.extend("w1", [LeaseReport("j1", attempt, 0)], lease_ms=0)
    await asyncio.sleep(0.005)


async def test_expired_lease_is_reported_to_its_owner_at_intervals(
    clock: TestClock, queue: JobQueue
) -> None:
    await enqueue(queue, job("j1", handle=42))
    await claim_ids(queue, "w1")
    assert await queue.reclaim() == []
    await clock.advance(LEASE_MS)
    for _ in range(2):
        assert await queue.reclaim() == [("j1", "a", "gw-1", 42, 1)]
        assert await queue.reclaim() == []
        await clock.advance(queue_module._REPORT_AGAIN_MS)


async def test_unresolved_lost_jobs_hide_no_others(clock: TestClock, queue: JobQueue) -> None:
    await enqueue(queue, *(job(f"j{number}") for number in range(3)))
    await claim_ids(queue, "w1")
    await clock.advance(LEASE_MS + 1)
    found = [lost.job_id for _ in range(3) for lost in await queue.reclaim(most=2)]
    assert sorted(found) == ["j0", "j1", "j2"]


async def test_requeued_job_comes_first_and_the_dead_attempt_is_fenced_off(
    queue: JobQueue,
) -> None:
    await enqueue(queue, job("j1"), job("j2"))
    await claim_ids(queue, "w1", most_jobs=1)
    await lose(queue)
    assert await queue.requeue(job("j1"), 1) is RequeueResult.REQUEUED
    assert await queue.requeue(job("j1"), 1) is RequeueResult.REQUEUED_BEFORE
    assert await queue.extend("w1", [LeaseReport("j1", 1, 50)], lease_ms=LEASE_MS) == ["j1"]

    result = await queue.claim("w2", PLENTY, most_jobs=10, lease_ms=LEASE_MS)

    assert [(claim.job.id, claim.attempt) for claim in result.claims] == [("j1", 2), ("j2", 1)]
    assert not await queue.finish("w1", LeaseReport("j1", 1, 50))
    assert await queue.finish("w2", LeaseReport("j1", 2, 1))


async def test_requeued_job_runs_with_its_new_content(queue: JobQueue, any_redis: "Redis") -> None:
    await enqueue(queue, job("j1"))
    await claim_ids(queue, "w1")
    await lose(queue)
    rest = job("j1", is_suspect=True, resumption=Resumption([SequenceProgress([1, 2, 3])], 10, 4))
    assert await queue.requeue(rest, 1) is RequeueResult.REQUEUED
    need = await any_redis.hget(keys.job(MODEL, "j1"), "need_tokens")
    assert need == str(needed_tokens(rest)).encode()
    result = await queue.claim("w2", PLENTY, most_jobs=1, lease_ms=LEASE_MS)
    assert [(claim.job, claim.attempt) for claim in result.claims] == [(rest, 2)]


def test_only_unfinished_sequences_need_room() -> None:
    fields: dict[str, Any] = {"prompt_tokens": 10, "max_tokens": 100, "n": 2, "best_of": 3}
    assert needed_tokens(job("j1", **fields)) == 10 + 3 * 100
    ended = SequenceProgress([1] * 50, FinishReason.STOP)
    sequences = [ended, SequenceProgress([2] * 7), SequenceProgress([])]
    rest = job("j1", resumption=Resumption(sequences), **fields)
    assert needed_tokens(rest) == 10 + 7 + 2 * 100


async def test_job_that_is_handed_back_is_requeued_before_its_lease_expires(
    queue: JobQueue,
) -> None:
    await enqueue(queue, job("j1"))
    await claim_ids(queue, "w1")
    assert await queue.requeue(job("j1"), 1) is RequeueResult.HELD
    assert await queue.requeue(job("j1"), 1, is_returned=True) is RequeueResult.REQUEUED
    assert await queue.requeue(job("j1"), 1, is_returned=True) is RequeueResult.REQUEUED_BEFORE
    assert (await queue.status())[:3] == (0, 1, 0)
    assert await claim_ids(queue, "w2") == ["j1"]
    assert await queue.requeue(job("j1"), 1, is_returned=True) is RequeueResult.REQUEUED_BEFORE
    assert (await queue.status())[:3] == (0, 0, 1)


async def test_requeue_of_an_unknown_job_changes_nothing(
    queue: JobQueue, any_redis: "Redis"
) -> None:
    assert await queue.requeue(job("j1"), 1) is RequeueResult.UNKNOWN
    assert await any_redis.dbsize() == 0
    # A failover may have lost the claim, or an earlier requeue.
    await enqueue(queue, job("j1"))
    assert await queue.requeue(job("j1"), 1) is RequeueResult.UNKNOWN
    await claim_ids(queue, "w1")
    assert await queue.requeue(job("j1"), 2) is RequeueResult.UNKNOWN
    assert await queue.finish("w1", LeaseReport("j1", 1, 1))
    assert await queue.requeue(job("j1"), 1) is RequeueResult.ENDED


async def revive(queue: JobQueue, attempt: int, **fields: Any) -> int:
    """Revive j1."""
    return await queue.revive(job("j1", **fields), weight=1.0, attempt=attempt)


async def test_a_job_that_redis_has_lost_is_revived_as_a_later_attempt(
    queue: JobQueue, any_redis: "Redis"
) -> None:
    await enqueue(queue, job("j1"))
    await claim_ids(queue, "w1")
    await any_redis.flushall()
    assert await revive(queue, 1, gateway="gw-2", handle=9) == 1
    assert (await queue.status())[:3] == (0, 1, 0)
    assert await any_redis.pttl(keys.job(MODEL, "j1")) > 0
    assert await any_redis.llen(keys.doorbell(MODEL)) == 1

    result = await queue.claim("w2", PLENTY, most_jobs=10, lease_ms=LEASE_MS)

    assert [(c.job.gateway, c.job.handle, c.attempt) for c in result.claims] == [("gw-2", 9, 2)]
    assert await queue.extend("w1", [LeaseReport("j1", 1, 5)], lease_ms=LEASE_MS) == ["j1"]
    assert not await queue.finish("w1", LeaseReport("j1", 1, 5))
    assert await queue.finish("w2", LeaseReport("j1", 2, 5))


@pytest.mark.parametrize("state", ["waiting", "leased", "lost", "cancelled", "ended"])
async def test_job_is_revived_in_every_state(queue: JobQueue, state: str) -> None:
    await enqueue(queue, job("j1"))
    if state != "waiting":
        await claim_ids(queue, "w1")
    if state == "lost":
        await lose(queue)
    elif state == "cancelled":
        await queue.cancel("j1", "a")
    elif state == "ended":
        await queue.finish("w1", LeaseReport("j1", 1, 5))
    over = await revive(queue, 0)
    assert over == (0 if state == "waiting" else 1)
    assert (await queue.status())[:3] == (0, 1, 0)
    assert await queue.reclaim() == []

    result = await queue.claim("w1", PLENTY, most_jobs=10, lease_ms=LEASE_MS)

    assert [claim.attempt for claim in result.claims] == [over + 1]
    lost = await queue.extend("w1", [LeaseReport("j1", 1, 6)], lease_ms=LEASE_MS)
    assert lost == ([] if state == "waiting" else ["j1"])
    assert (await queue.status())[:3] == (0, 0, 1)


async def test_revival_fences_off_an_attempt_that_redis_lost(queue: JobQueue) -> None:
    await enqueue(queue, job("j1"))
    await claim_ids(queue, "w1")
    assert await revive(queue, 4) == 4
    assert await revive(queue, 4) == 4, "its reply may be lost"
    result = await queue.claim("w2", PLENTY, most_jobs=10, lease_ms=LEASE_MS)
    assert [claim.attempt for claim in result.claims] == [5]


async def test_a_revived_job_keeps_its_place(queue: JobQueue, any_redis: "Redis") -> None:
    await enqueue(queue, job("j1"), job("j2"))
    await claim_ids(queue, "w1", most_jobs=1)
    await revive(queue, 1)
    assert await claim_ids(queue) == ["j1", "j2"]
    await enqueue(queue, job("j3"), job("j4"))
    await any_redis.delete(keys.job(MODEL, "j3"))
    await queue.revive(job("j3"), weight=1.0, attempt=0)
    # Its position was in the lost hash: it is the last one now, once.
    assert await claim_ids(queue) == ["j4", "j3"]
    assert (await queue.status()).waiting_jobs == 0


async def test_charges_of_a_revived_job_are_not_repeated(
    queue: JobQueue, any_redis: "Redis"
) -> None:
    counters = keys.service_counters(MODEL)
    await enqueue(queue, job("j1", prompt_tokens=10))
    await claim_ids(queue, "w1")
    await queue.extend("w1", [LeaseReport("j1", 1, 8)], lease_ms=LEASE_MS)
    assert await any_redis.hget(counters, "a") == b"26"
    await revive(queue, 1)
    await claim_ids(queue, "w1")
    await queue.finish("w1", LeaseReport("j1", 2, 8, 10))
    assert await any_redis.hget(counters, "a") == b"26"
    await revive(queue, 2)
    await claim_ids(queue, "w1")
    await queue.extend("w1", [LeaseReport("j1", 3, 9)], lease_ms=LEASE_MS)
    assert await any_redis.hget(counters, "a") == b"28"
    await any_redis.flushall()
    await revive(queue, 3, resumption=Resumption([SequenceProgress([5] * 9)]))
    await claim_ids(queue, "w1")
    await queue.finish("w1", LeaseReport("j1", 4, 10, 10))
    assert await any_redis.hget(counters, "a") == b"2"


async def test_the_prompt_of_a_second_attempt_is_not_charged(
    queue: JobQueue, any_redis: "Redis"
) -> None:
    await enqueue(queue, job("j1", prompt_tokens=10))
    await claim_ids(queue, "w1")
    await lose(queue)
    await queue.requeue(job("j1"), 1)
    await claim_ids(queue, "w2")
    assert await any_redis.hget(keys.service_counters(MODEL), "a") == b"10"


async def test_worker_that_returns_in_time_keeps_its_job(queue: JobQueue) -> None:
    await enqueue(queue, job("j1"))
    await claim_ids(queue, "w1")
    await lose(queue)
    assert len(await queue.reclaim()) == 1
    assert await queue.extend("w1", [LeaseReport("j1", 1, 5)], lease_ms=LEASE_MS) == []
    assert await queue.requeue(job("j1"), 1) is RequeueResult.HELD
    assert await queue.finish("w1", LeaseReport("j1", 1, 6))


async def test_a_job_whose_hash_expired_is_skipped_and_not_charged(
    queue: JobQueue, any_redis: "Redis"
) -> None:
    await enqueue(queue, job("j1"), job("j2"))
    await any_redis.delete(keys.job(MODEL, "j1"))
    assert await claim_ids(queue) == ["j2"]
    assert (await queue.status()).waiting_jobs == 0


@every_redis
async def test_announced_workers_are_counted_until_they_stop_reporting(queue: JobQueue) -> None:
    card = WorkerCard("w1", MODEL, WorkerState.READY, "scripted", created=1)
    await queue.announce(card, ttl_ms=60_000)
    assert (await queue.status()).ready_workers == 1
    await queue.announce(card, ttl_ms=1)
    await asyncio.sleep(0.01)
    assert (await queue.status()).ready_workers == 0
    await queue.announce(card, ttl_ms=60_000)
    draining = WorkerCard("w1", MODEL, WorkerState.DRAINING, "scripted", created=1)
    await queue.announce(draining, ttl_ms=60_000)
    assert (await queue.status()).ready_workers == 0


@every_redis
async def test_scripts_are_loaded_again_after_a_flush(queue: JobQueue, any_redis: "Redis") -> None:
    await enqueue(queue, job("j1"))
    await any_redis.script_flush()
    assert await claim_ids(queue) == ["j1"]
