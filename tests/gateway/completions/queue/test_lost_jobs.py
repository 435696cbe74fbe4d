"""Jobs whose worker, gateway or Redis entry is lost."""

from collections.abc import Callable
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from contract import keys, messages
from contract.messages import Frame, JobFailed, JobFinished, JobLost
from contract.outcomes import FailureCode, JobReceipt, JobState
from contract.queue import JobQueue, RequeueResult
from contract.tier import ServiceTier
from gateway.completions.queue import lost_jobs
from gateway.completions.queue.ticket import MAX_LOSSES
from tests.gateway.conftest import eventually, nothing_left
from tests.gateway.desk import (
    GATEWAY,
    MODEL,
    Desk,
    begun,
    cancel_unreachable,
    failure,
    take,
    texts,
    ticket_of,
)
from tests.support.fake_worker import ENGINE, FakeWorker


async def test_job_lost_before_its_first_token_is_claimed_again(
    desk: Desk, worker: FakeWorker, redis: "Redis"
) -> None:
    generation = await desk.request()
    await worker.lose(await worker.claim_one())

    other = FakeWorker(redis, MODEL, name="fake-2")
    claim = await other.claim_one()
    assert claim.attempt == 2
    await other.say(claim, "a", "b")
    await other.finish(claim)

    assert texts(await take(generation, 3)) == ["a", "b"]
    assert await nothing_left(redis, MODEL)


async def test_requeued_job_goes_before_others_of_its_tenant(
    desk: Desk, worker: FakeWorker
) -> None:
    await desk.request()
    first = await worker.claim_one()
    await desk.request()
    await worker.lose(first)
    await eventually(lambda: _waiting(desk, 2), what="the job being requeued")
    again = await worker.claim_one()
    assert (again.job.id, again.attempt) == (first.job.id, 2)


async def _waiting(desk: Desk, number: int) -> bool:
    return (await desk.catalogue.queue(MODEL).status()).waiting_jobs == number


async def test_job_lost_repeatedly_without_a_token_fails(
    desk: Desk, worker: FakeWorker, redis: "Redis"
) -> None:
    generation = await desk.request()
    for attempt in range(1, MAX_LOSSES + 1):
        claim = await worker.claim_one()
        assert (claim.attempt, claim.job.is_suspect) == (attempt, attempt > 1)
        await worker.lose(claim)
    assert await failure(generation) is FailureCode.WORKER_LOST
    await eventually(lambda: nothing_left(redis, MODEL), what="the job being dropped")
    (receipt,) = await worker.queue.receipts([claim.job.id])
    assert receipt == JobReceipt(JobState.ENDED, engine=ENGINE)


async def test_loss_of_a_job_that_its_worker_still_holds_does_not_count(
    desk: Desk, worker: FakeWorker, redis: "Redis"
) -> None:
    generation = await desk.request()
    claim = await worker.claim_one()
    lost = JobLost(claim.job.handle, claim.attempt, MODEL, claim.job.id, claim.job.tenant)
    notice = messages.encode(Frame("gw-other", 0, lost=[lost]))
    ticket = ticket_of(desk, generation)
    entry: bytes | str = b""

    def is_restored() -> bool:
        return desk.dispatcher.reader.last_entry == entry and ticket.is_followed

    for _ in range(MAX_LOSSES):
        entry = await redis.xadd(keys.replies(GATEWAY), {"f": notice})
        await eventually(is_restored, what="the lease being found")
    await worker.finish(claim)
    (finished,) = await take(generation, 1)
    assert isinstance(finished, JobFinished)


async def test_job_that_makes_progress_may_be_lost_any_number_of_times(
    desk: Desk, worker: FakeWorker
) -> None:
    generation = await desk.request()
    for number in range(2 * MAX_LOSSES):
        claim = await worker.claim_one()
        assert not claim.job.is_suspect
        await worker.say(claim, str(number))
        await worker.lose(claim)
    claim = await worker.claim_one()
    await worker.finish(claim)
    replies = await take(generation, 2 * MAX_LOSSES + 1)
    assert texts(replies) == [str(number) for number in range(2 * MAX_LOSSES)]


async def test_loss_after_a_requeue_with_a_lost_reply_is_detected(
    desk: Desk, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    requeue, answers_lost = JobQueue.requeue, 0

    async def requeue_without_reply(
        queue: JobQueue, *arguments: Any, **options: Any
    ) -> RequeueResult:
        nonlocal answers_lost
        result = await requeue(queue, *arguments, **options)
        if answers_lost == 0:
            answers_lost += 1
            raise RedisConnectionError
        return result

    monkeypatch.setattr(JobQueue, "requeue", requeue_without_reply)
    generation = await desk.request()
    await worker.lose(await worker.claim_one())
    await worker.lose(await worker.claim_one())
    third = await worker.claim_one()
    assert answers_lost == 1
    assert third.attempt == 3
    await worker.say(third, "at last")
    assert texts(await take(generation, 1)) == ["at last"]


async def test_job_lost_during_enqueueing_is_enqueued_once(
    desk: Desk, worker: FakeWorker, redis: "Redis", monkeypatch: pytest.MonkeyPatch
) -> None:
    enqueue = JobQueue.enqueue

    async def enqueue_late(queue: JobQueue, *arguments: Any, **options: Any) -> Any:
        (ticket,) = desk.dispatcher._jobs.tickets.values()
        ticket.last_reply_at -= 3600
        await desk.look_after_jobs()
        return await enqueue(queue, *arguments, **options)

    monkeypatch.setattr(JobQueue, "enqueue", enqueue_late)
    generation = await desk.request()
    claim = await worker.claim_one()
    await worker.say(claim, "a")
    await worker.finish(claim)
    assert (claim.attempt, texts(await take(generation, 2))) == (1, ["a"])
    assert await nothing_left(redis, MODEL)


@pytest.mark.parametrize("state", ["waiting", "leased"])
async def test_job_that_redis_lost_is_enqueued_again(
    desk: Desk, worker: FakeWorker, redis: "Redis", state: str
) -> None:
    generation = await desk.request()
    expected = []
    if state == "leased":
        await worker.say(await worker.claim_one(), "a")
        expected.append("a")
    await redis.flushall()
    claim = await worker.claim_one()
    # Any client that may have claimed it unheard is fenced off.
    assert claim.attempt == 2
    await worker.say(claim, "b")
    await worker.finish(claim)
    assert texts(await take(generation, len(expected) + 2)) == [*expected, "b"]
    assert await nothing_left(redis, MODEL)


async def test_job_that_ended_without_a_reply_resumes_after_the_received_tokens(
    desk: Desk, worker: FakeWorker
) -> None:
    generation, claim = await begun(desk, worker)
    await worker.drop(claim, tokens=2)
    again = await worker.claim_one()
    assert again.attempt == 2
    await worker.say(again, "b")
    await worker.finish(again)
    assert texts(await take(generation, 3)) == ["a", "b"]
    (receipt,) = await worker.queue.receipts([claim.job.id])
    assert receipt == JobReceipt(JobState.ENDED, 2, 3, 0, ENGINE)


async def test_silent_leased_job_continues(
    desk: Desk, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    generation = await desk.request()
    claim = await worker.claim_one()
    monkeypatch.setattr(lost_jobs, "SILENCE_SECONDS", 0.0)
    ticket_of(desk, generation).check_at = 0.0
    await desk.look_after_jobs()
    assert desk.dispatcher.jobs_in_flight == 1
    await worker.say(claim, "a")
    assert texts(await take(generation, 1)) == ["a"]


async def test_unclaimed_job_fails_after_the_queue_timeout(
    open_desk: Callable[..., Any], redis: "Redis"
) -> None:
    desk = await open_desk(queue_timeout_seconds=0.3)
    generation = await desk.request()
    assert await failure(generation) is FailureCode.QUEUE_TIMEOUT
    await eventually(lambda: nothing_left(redis, MODEL), what="the job being dropped")


async def test_unclaimed_batch_job_waits_until_its_deadline(
    open_desk: Callable[..., Any], redis: "Redis"
) -> None:
    desk = await open_desk(queue_timeout_seconds=0.0)
    later = await desk.request(service_tier=ServiceTier.BATCH)
    soon = await desk.request(service_tier=ServiceTier.BATCH, deadline_seconds=0.5)
    assert await failure(soon) is FailureCode.DEADLINE_EXCEEDED
    assert desk.dispatcher.jobs_in_flight == 1
    await desk.dispatcher.cancel(later)
    await eventually(lambda: nothing_left(redis, MODEL), what="the jobs being dropped")


@pytest.fixture
async def owner(open_desk: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Desk:
    """A gateway that never looks for expired leases."""
    owner: Desk = await open_desk("gw-owner")

    async def looks_away() -> None:
        """Find none."""

    monkeypatch.setattr(owner.dispatcher._lost_jobs, "reclaim", looks_away)
    await owner.close()
    await owner.open()
    return owner


async def test_notice_of_a_lost_job_reaches_the_gateway_that_owns_it(
    owner: Desk, open_desk: Callable[..., Any], worker: FakeWorker
) -> None:
    other = await open_desk("gw-other")
    generation = await owner.request()
    await worker.lose(await worker.claim_one())
    claim = await worker.claim_one()
    assert (claim.attempt, claim.job.gateway) == (2, "gw-owner")
    await worker.say(claim, "a")
    assert texts(await take(generation, 1)) == ["a"]
    assert other.dispatcher.jobs_in_flight == 0


async def test_lease_of_a_failed_job_is_dropped_by_any_gateway(
    owner: Desk, open_desk: Callable[..., Any], worker: FakeWorker, redis: "Redis"
) -> None:
    await open_desk("gw-other")
    generation = await owner.request()
    claim = await worker.claim_one()
    failed = JobFailed(claim.job.handle, claim.attempt, FailureCode.ENGINE_ERROR, "")
    await worker.send("gw-owner", failed=[failed])
    assert await failure(generation) is FailureCode.ENGINE_ERROR
    await worker.lose(claim)
    await eventually(lambda: nothing_left(redis, MODEL), what="the lease being dropped")
    (receipt,) = await worker.queue.receipts([claim.job.id])
    assert receipt == JobReceipt(JobState.ENDED, engine=ENGINE)


async def test_lost_job_that_another_gateway_owns_is_left_to_it(
    owner: Desk, worker: FakeWorker, redis: "Redis"
) -> None:
    generation = await owner.request()
    claim = await worker.claim_one()
    job = claim.job
    failed = JobFailed(job.handle, claim.attempt, FailureCode.TAKEN_OVER, "")
    await worker.send("gw-owner", failed=[failed])
    await failure(generation)
    await redis.hset(keys.job(MODEL, job.id), "gateway", "gw-heir")
    lost = JobLost(job.handle, claim.attempt, MODEL, job.id, job.tenant)
    await worker.send("gw-owner", lost=[lost])
    await owner.catch_up()
    await owner.look_after_jobs()
    assert await worker.queue.receipts([job.id]) == [JobReceipt(JobState.RUNNING, engine=ENGINE)]


async def test_lease_of_a_dead_gateways_job_is_cleaned_up_by_another(
    open_desk: Callable[..., Any], worker: FakeWorker, redis: "Redis"
) -> None:
    dead = await open_desk("gw-dead")
    await dead.request()
    await dead.close()
    await redis.delete(keys.gateway_alive("gw-dead"))
    await open_desk("gw-living")
    await worker.lose(await worker.claim_one())
    await eventually(lambda: nothing_left(redis, MODEL), what="the lease being dropped")


async def test_new_gateway_does_not_consider_others_dead(
    open_desk: Callable[..., Any], worker: FakeWorker, redis: "Redis"
) -> None:
    silent = await open_desk("gw-silent")
    await silent.request()
    await silent.close()
    await redis.delete(keys.gateway_alive("gw-silent"))
    claim = await worker.claim_one()
    await worker.lose(claim)
    young = await open_desk("gw-young", resume_after_seconds=600.0)
    own = await young.request()
    again = await worker.claim_one()
    await worker.lose(again)
    # It recognises its own jobs.
    assert (await worker.claim_one()).attempt == 2
    assert ticket_of(young, own).attempt == 2
    (receipt,) = await worker.queue.receipts([claim.job.id])
    assert receipt.state is JobState.RUNNING
    await silent.dispatcher.beat()
    await eventually(
        lambda: redis.exists(keys.replies("gw-silent")), what="the report to the silent gateway"
    )


async def test_job_that_its_gateway_cancelled_is_cleaned_up(
    desk: Desk, worker: FakeWorker, redis: "Redis", monkeypatch: pytest.MonkeyPatch
) -> None:
    generation = await desk.request()
    claim = await worker.claim_one()
    await cancel_unreachable(desk, generation, monkeypatch)
    assert not await nothing_left(redis, MODEL)
    await worker.lose(claim)
    await eventually(lambda: nothing_left(redis, MODEL), what="the lease being dropped")


async def test_loss_of_a_finished_job_changes_nothing(
    desk: Desk, worker: FakeWorker, redis: "Redis"
) -> None:
    generation, claim = await begun(desk, worker)
    await worker.send(GATEWAY, finished=[JobFinished(claim.job.handle, claim.attempt, 3, 1, 0)])
    await worker.lose(claim)
    await eventually(lambda: nothing_left(redis, MODEL), what="the lease being dropped")
    replies = await take(generation, 2)
    assert texts(replies) == ["a"]
    assert isinstance(replies[-1], JobFinished)
