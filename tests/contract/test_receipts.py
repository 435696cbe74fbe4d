"""The receipt of a job, however it ends, and who may drop it."""

from typing import Any

import pytest
from redis.asyncio import Redis

from contract import keys
from contract.messages import GenerationJob, Resumption, SequenceProgress
from contract.outcomes import JobReceipt, JobState
from contract.queue import EnqueueResult, JobQueue, LeaseReport, RequeueResult
from contract.sampling import SamplingSpec
from tests.contract.test_queue import LEASE_MS, MODEL, PLENTY, claim_ids, enqueue, job

ABSENT, WAITING = JobReceipt(JobState.ABSENT), JobReceipt(JobState.WAITING)
LARGEST_RECEIPT_BYTES = 256


@pytest.fixture
def queue(any_redis: "Redis") -> JobQueue:
    """An empty queue."""
    return JobQueue(any_redis, MODEL)


async def receipt(queue: JobQueue, job_id: str = "j1") -> JobReceipt:
    """Return the receipt of one job."""
    (found,) = await queue.receipts([job_id])
    return found


async def start(queue: JobQueue, worker: str = "w1") -> None:
    """Have j1 enqueued and claimed."""
    await enqueue(queue, job("j1"))
    assert await claim_ids(queue, worker) == ["j1"]


async def report(
    queue: JobQueue, *counts: int, worker: str = "w1", attempt: int = 1, lease_ms: int = LEASE_MS
) -> list[str]:
    """Report completion, prompt and cached tokens of j1."""
    return await queue.extend(worker, [LeaseReport("j1", attempt, *counts)], lease_ms=lease_ms)


def running(completion: int = 0, prompt: int = 0, cached: int = 0) -> JobReceipt:
    """Completion, prompt and cached tokens so far."""
    return JobReceipt(JobState.RUNNING, completion, prompt, cached)


def ended(completion: int = 0, prompt: int = 0, cached: int = 0) -> JobReceipt:
    """Completion, prompt and cached tokens at the end."""
    return JobReceipt(JobState.ENDED, completion, prompt, cached)


async def test_receipts_follow_a_job_from_its_queue_to_its_end(queue: JobQueue) -> None:
    assert await receipt(queue) == ABSENT
    await enqueue(queue, job("j1"))
    assert await receipt(queue) == WAITING
    await claim_ids(queue)
    assert await receipt(queue) == running()
    assert await report(queue, 3, 10, 8) == []
    assert await receipt(queue) == running(3, 10, 8)
    assert await queue.finish("w1", LeaseReport("j1", 1, 5, 10, 8))
    assert await receipt(queue) == ended(5, 10, 8)


async def test_receipts_come_in_the_requested_order(queue: JobQueue) -> None:
    await enqueue(queue, job("j1"), job("j2"))
    await claim_ids(queue, most_jobs=1)
    assert await queue.receipts(["j2", "unknown", "j1"]) == [WAITING, ABSENT, running()]
    assert await queue.receipts([]) == []


async def test_receipt_is_small_and_expires_unread(queue: JobQueue, any_redis: "Redis") -> None:
    name = "cmpl-0123456789abcdef0123456789abcdef-0"
    key = keys.job(MODEL, name)
    await enqueue(queue, job(name, prompt_tokens=5000))
    await claim_ids(queue)
    assert (await any_redis.memory_usage(key, samples=0) or 0) > 5000
    await queue.finish("w1", LeaseReport(name, 1, 10**6, 10**6, 10**6))
    assert 0 < (await any_redis.memory_usage(key, samples=0) or 0) < LARGEST_RECEIPT_BYTES
    hour_ms = 3_600_000
    assert hour_ms < await any_redis.pttl(key) <= hour_ms + 60_000


async def test_job_that_has_ended_is_not_enqueued_again(queue: JobQueue) -> None:
    await start(queue)
    await queue.finish("w1", LeaseReport("j1", 1, 5, 10))
    assert await enqueue(queue, job("j1")) is EnqueueResult.DUPLICATE
    assert await claim_ids(queue) == []
    assert await receipt(queue) == ended(5, 10, 0)


async def test_job_cancelled_while_it_waits_leaves_no_receipt(queue: JobQueue) -> None:
    await enqueue(queue, job("j1"))
    assert await queue.cancel("j1", "a")
    assert await receipt(queue) == ABSENT


async def test_job_cancelled_while_it_runs_ends_with_its_workers_counts(queue: JobQueue) -> None:
    await start(queue)
    assert await queue.cancel("j1", "a")
    assert await receipt(queue) == running()
    # It may report once more before it receives the cancellation.
    assert await report(queue, 3, 10) == ["j1"]
    assert await receipt(queue) == running(3, 10, 0)
    assert await queue.finish("w1", LeaseReport("j1", 1, 4, 10))
    assert await receipt(queue) == ended(4, 10, 0)
    assert not await queue.cancel("j1", "a")
    assert await receipt(queue) == ended(4, 10, 0)


async def test_lost_job_that_is_cancelled_ends_with_the_last_report(queue: JobQueue) -> None:
    await start(queue)
    await report(queue, 3, 10, 8, lease_ms=0)
    assert await queue.cancel("j1", "a")
    assert await receipt(queue) == ended(3, 10, 8)
    assert (await queue.status()).leased_jobs == 0
    assert await queue.reclaim() == []


async def test_cancelled_job_that_is_lost_ends_with_the_last_report(queue: JobQueue) -> None:
    await start(queue)
    await queue.cancel("j1", "a")
    await report(queue, 3, 10, 8, lease_ms=0)
    assert await receipt(queue) == running(3, 10, 8)
    assert await queue.requeue(job("j1"), 1) is RequeueResult.ENDED
    assert await queue.reclaim() == [], "its gateway gets no report"
    assert await receipt(queue) == ended(3, 10, 8)
    assert (await queue.status()).leased_jobs == 0


async def test_lost_job_that_was_never_reported_ends_with_nothing(queue: JobQueue) -> None:
    await enqueue(queue, job("j1"))
    await queue.claim("w1", PLENTY, most_jobs=1, lease_ms=0)
    await queue.cancel("j1", "a")
    assert await receipt(queue) == ended()


async def test_receipt_names_the_engine_of_the_last_claim(queue: JobQueue) -> None:
    names = ["finished", "cancelled", "lost"]
    await enqueue(queue, *map(job, names))
    await queue.claim("w1", PLENTY, most_jobs=3, lease_ms=LEASE_MS, engine="vllm 0.31.0")
    assert {each.engine for each in await queue.receipts(names)} == {"vllm 0.31.0"}
    await queue.extend("w1", [LeaseReport(name, 1, 0) for name in names], lease_ms=0)
    assert await queue.requeue(job("finished"), 1) is RequeueResult.REQUEUED
    await queue.claim("w2", PLENTY, most_jobs=1, lease_ms=LEASE_MS, engine="vllm 0.32.0")
    await queue.finish("w2", LeaseReport("finished", 2, 5, 10))
    await queue.cancel("cancelled", "a")
    await queue.extend("w1", [LeaseReport("lost", 1, 0)], lease_ms=LEASE_MS)
    await queue.cancel("lost", "a")
    await queue.extend("w1", [LeaseReport("lost", 1, 0)], lease_ms=0)
    await queue.reclaim()
    receipts = await queue.receipts(names)
    assert [each.state for each in receipts] == [JobState.ENDED] * 3
    assert [each.engine for each in receipts] == ["vllm 0.32.0", "vllm 0.31.0", "vllm 0.31.0"]


async def test_worker_that_returns_too_late_changes_no_receipt(queue: JobQueue) -> None:
    await start(queue)
    await report(queue, 3, 10, lease_ms=0)
    await queue.cancel("j1", "a")
    assert await report(queue, 50, 10) == ["j1"]
    assert not await queue.finish("w1", LeaseReport("j1", 1, 60, 10))
    assert await receipt(queue) == ended(3, 10, 0)
    assert (await queue.status()).leased_jobs == 0


async def test_another_attempt_counts_from_zero(queue: JobQueue) -> None:
    await start(queue)
    await report(queue, 3, 10, 8, lease_ms=0)
    assert await queue.requeue(job("j1"), 1) is RequeueResult.REQUEUED
    assert await receipt(queue) == WAITING
    await claim_ids(queue, "w2")
    assert await receipt(queue) == running()
    # The first worker ends its lost job, as it must.
    assert not await queue.finish("w1", LeaseReport("j1", 1, 90, 10))
    assert await receipt(queue) == running()
    assert await queue.finish("w2", LeaseReport("j1", 2, 2, 10))
    assert await receipt(queue) == ended(2, 10, 0)


def resumed(*tokens: int, prompt: int = 10, cached: int = 8, **fields: Any) -> GenerationJob:
    """Return j1 as it resumes after a number of tokens of each sequence."""
    sequences = [SequenceProgress([5] * number) for number in tokens]
    return job("j1", resumption=Resumption(sequences, prompt, cached), **fields)


async def wait_again(queue: JobQueue) -> None:
    """Have j1 claimed, lost after five tokens, and requeued to resume after four."""
    await start(queue)
    await report(queue, 5, 10, 8, lease_ms=0)
    await queue.requeue(resumed(4), 1)


@pytest.mark.parametrize("how", ["requeue", "revive"])
async def test_resumed_attempt_counts_from_the_received_tokens(queue: JobQueue, how: str) -> None:
    await start(queue)
    await report(queue, 5, 10, 8, lease_ms=0)
    rest = resumed(3, 1, n=2, best_of=2)
    if how == "requeue":
        assert await queue.requeue(rest, 1) is RequeueResult.REQUEUED
    else:
        await queue.revive(rest, weight=1.0, attempt=1)
    assert await receipt(queue) == JobReceipt(JobState.WAITING, 4, 10, 8)
    await claim_ids(queue, "w2")
    assert await receipt(queue) == running(4, 10, 8)
    await report(queue, 6, 10, 8, worker="w2", attempt=2)
    assert await receipt(queue) == running(6, 10, 8)


async def test_one_sequence_for_all_choices_counts_for_each(queue: JobQueue) -> None:
    await start(queue)
    await report(queue, 9, 10, lease_ms=0)
    rest = resumed(3, n=3, best_of=3, sampling=SamplingSpec(seed=1, temperature=0.0))
    assert rest.is_replicated
    await queue.requeue(rest, 1)
    assert await receipt(queue) == JobReceipt(JobState.WAITING, 9, 10, 8)


async def test_started_job_cancelled_while_waiting_leaves_the_received_counts(
    queue: JobQueue, any_redis: "Redis"
) -> None:
    await wait_again(queue)
    assert await queue.cancel("j1", "a")
    assert await receipt(queue) == ended(4, 10, 8)
    assert await any_redis.pttl(keys.job(MODEL, "j1")) > 0
    assert (await queue.status())[:3] == (0, 0, 0)
    assert not await queue.cancel("j1", "a")


async def test_settled_job_cancelled_while_waiting_again_leaves_nothing(
    queue: JobQueue, any_redis: "Redis"
) -> None:
    await wait_again(queue)
    await queue.forget(["j1"])
    await queue.cancel("j1", "a")
    assert not await any_redis.exists(keys.job(MODEL, "j1"))


async def test_receipt_names_the_attempt_and_its_end(queue: JobQueue, any_redis: "Redis") -> None:
    for how in ("finish", "cancel", "reclaim", "cancel waiting"):
        await any_redis.flushall()
        await start(queue)
        if how == "finish":
            await queue.finish("w1", LeaseReport("j1", 1, 5, 10))
        elif how == "cancel":
            await report(queue, 5, 10, lease_ms=0)
            await queue.cancel("j1", "a")
        elif how == "reclaim":
            await queue.cancel("j1", "a")
            await report(queue, 5, 10, lease_ms=0)
            await queue.reclaim()
        else:
            await report(queue, 5, 10, lease_ms=0)
            await queue.requeue(resumed(4), 1)
            await queue.cancel("j1", "a")
        left = await any_redis.hmget(keys.job(MODEL, "j1"), ["ended", "gateway", "attempt"])
        assert left == [b"1", b"gw-1", b"1"], how


async def test_dropped_receipt_is_deleted(queue: JobQueue, any_redis: "Redis") -> None:
    await start(queue)
    await queue.finish("w1", LeaseReport("j1", 1, 5, 10))
    await queue.forget(["j1", "unknown"])
    assert await receipt(queue) == ABSENT
    assert not await any_redis.exists(keys.job(MODEL, "j1"), keys.job(MODEL, "unknown"))


async def test_job_that_is_settled_before_its_end_leaves_no_receipt(
    queue: JobQueue, any_redis: "Redis"
) -> None:
    await start(queue)
    await queue.forget(["j1"])
    assert await report(queue, 3, 10) == []
    assert await receipt(queue) == running(3, 10, 0)
    assert await queue.finish("w1", LeaseReport("j1", 1, 5, 10))
    assert not await any_redis.exists(keys.job(MODEL, "j1"))


@pytest.mark.parametrize("how", ["cancel", "reclaim"])
async def test_settled_job_whose_worker_died_leaves_no_receipt(
    queue: JobQueue, any_redis: "Redis", how: str
) -> None:
    await start(queue)
    if how == "reclaim":
        await queue.cancel("j1", "a")
    await queue.forget(["j1"])
    await report(queue, 3, 10, lease_ms=0)
    if how == "cancel":
        await queue.cancel("j1", "a")
    else:
        await queue.reclaim()
    assert not await any_redis.exists(keys.job(MODEL, "j1"))
    assert (await queue.status()).leased_jobs == 0


async def test_end_of_a_job_that_redis_has_lost_leaves_nothing(
    queue: JobQueue, any_redis: "Redis"
) -> None:
    await start(queue)
    await any_redis.flushall()
    assert not await queue.finish("w1", LeaseReport("j1", 1, 5, 10))
    assert await report(queue, 5, 10) == ["j1"]
    assert await any_redis.dbsize() == 0
