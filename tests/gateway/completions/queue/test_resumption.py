"""A lost job continues at another worker, exactly after the received tokens."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any
from unittest.mock import ANY

import pytest
from prometheus_client import REGISTRY
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from common import clock
from contract import keys, messages
from contract.affinity import class_affinity
from contract.messages import (
    Frame,
    JobFinished,
    JobLost,
    JobMessage,
    JobStarted,
    PromptScored,
    Ranking,
    Resumption,
    ReturnReason,
    SequenceProgress,
    TokenLogprob,
    encode_logprobs,
)
from contract.outcomes import FailureCode, FinishReason, JobReceipt, JobState
from contract.queue import (
    EnqueueReport,
    EnqueueResult,
    JobClaim,
    JobQueue,
    LeaseReport,
    RequeueResult,
    ShedJob,
)
from contract.sampling import SamplingSpec
from gateway.completions.queue.dispatcher import notify_shed
from gateway.completions.queue.generation import Generation
from gateway.completions.queue.lost_jobs import UNSERVED_SECONDS
from gateway.completions.queue.output import JobOutput
from gateway.completions.queue.ticket import MAX_KEPT
from gateway.platform.telemetry import INTER_TOKEN_LATENCY
from gateway.records.usage_record import Counts, Outcome
from tests.gateway.conftest import eventually, nothing_left
from tests.gateway.desk import GATEWAY, MODEL, Desk, begun, failure, take, texts, ticket_of
from tests.support.cases import all_cases
from tests.support.fake_worker import ENGINE, FakeWorker
from tests.support.usage import usage_record

STOP = FinishReason.STOP
GREEDY = SamplingSpec(seed=1, temperature=0.0)


@pytest.fixture
def other(redis: "Redis") -> FakeWorker:
    """A second worker of the model."""
    return FakeWorker(redis, MODEL, name="fake-2")


def received(*tokens: int, **fields: Any) -> Resumption:
    """Return the deltas of a number of tokens of each sequence, as sent by test workers."""
    sequences = [SequenceProgress([100 + i for i in range(number)]) for number in tokens]
    return Resumption(sequences, generation_ms=ANY, **fields)


async def finish_elsewhere(
    generation: Generation, other: FakeWorker, *, attempt: int = 2
) -> JobClaim:
    """Let another worker finish the job after its first token, and check the result."""
    again = await other.claim_one()
    assert (again.attempt, again.job.resumption) == (attempt, received(1))
    await other.say(again, "b")
    await other.finish(again)
    assert texts(await take(generation, 3)) == ["a", "b"]
    return again


async def test_another_worker_resumes_after_the_received_tokens(
    desk: Desk, worker: FakeWorker, other: FakeWorker, redis: "Redis"
) -> None:
    generation = await desk.request(score_prompt=True, logprobs=0)
    claim = await worker.claim_one()
    scores = [encode_logprobs([TokenLogprob("x", None, 0)])]
    await worker.send(
        GATEWAY,
        started=[JobStarted(claim.job.handle, 1, 3, 2, "class")],
        prompts=[PromptScored(claim.job.handle, 1, scores)],
    )
    await worker.say(claim, "a", "b")
    await worker.lose(claim, tokens=5)

    again = await other.claim_one()
    assert again.attempt == 2
    rest = received(2, prompt_tokens=3, cached_tokens=2, is_prompt_scored=True)
    assert again.job.resumption == rest
    assert not again.job.is_suspect
    (receipt,) = await other.queue.receipts([claim.job.id])
    assert receipt == JobReceipt(JobState.RUNNING, 2, 3, 2, ENGINE)
    # Tokens that the next attempt repeats are dropped.
    await other.send(GATEWAY, started=[JobStarted(claim.job.handle, 2, 3, 3, "class")])
    await other.conclude(again, "c")

    replies = await take(generation, 5)
    assert texts(replies) == ["a", "b", "c"]
    assert sum(isinstance(reply, PromptScored) for reply in replies) == 1
    assert generation.started[0].cached_tokens == 2
    assert generation.received_tokens[0] == 3
    assert await nothing_left(redis, MODEL)


@all_cases(
    ("attempts", "classes", "crossings"),
    [
        ([("a", 1), ("a", 1)], "a", 0),
        ([("a", 1), ("b", 1)], "a, b", 1),
        ([("a", 1), ("b", 0), ("a", 1)], "a", 0),
        ([("a", 1), ("b", 0), ("a", 0), ("b", 1)], "a, b", 1),
        ([("a", 0), ("b", 2)], "b", 0),
        ([("a", 1), ("b", 1), ("a", 1)], "a, b", 2),
    ],
)
async def test_receipt_says_which_classes_generated_the_tokens(
    desk: Desk, worker: FakeWorker, attempts: list[tuple[str, int]], classes: str, crossings: int
) -> None:
    generation, history = await desk.request(), list[JobMessage]()
    generation.on_reply = lambda _, message: history.append(message)
    last = ""
    for number, (name, tokens) in enumerate(attempts, 1):
        claim = await worker.claim_one()
        assert claim.job.affinity == class_affinity(last), "another class may only continue it"
        started = JobStarted(claim.job.handle, number, 3, 0, name)
        await worker.send(GATEWAY, started=[started])
        await worker.say(claim, *"ab"[:tokens])
        if number == len(attempts):
            await worker.finish(claim, exactness_class=name)
        else:
            last = name if tokens else last
            await worker.lose(claim, tokens=worker.sent_tokens(claim))
    await eventually(lambda: generation.finished, what="the end")
    # A gateway that takes the response over finds the same in its journal.
    replayed = JobOutput(generation.jobs[0], INTER_TOKEN_LATENCY.labels(MODEL))
    assert all(replayed.replay(message, 0.0) for message in history)
    draft = usage_record(1)
    for each in (generation.classes[0], replayed.classes):
        record = draft.ended(
            Counts(), free=Counts(), outcome=Outcome.FINISHED, code="", classes=[[*dict(each)]]
        )
        assert (record.exactness_class, len(each) - 1) == (classes, crossings)


async def test_replies_of_a_lost_attempt_are_ignored(
    desk: Desk, worker: FakeWorker, other: FakeWorker
) -> None:
    generation, claim = await begun(desk, worker)
    await worker.lose(claim)
    again = await other.claim_one()
    await worker.say(claim, "not this")
    await worker.finish(claim)
    await other.say(again, "b")
    await worker.say(claim, "nor that")
    await other.finish(again)
    assert texts(await take(generation, 3)) == ["a", "b"]


def metric(name: str, **labels: str) -> float:
    """Return the value of one of this process's metrics."""
    return REGISTRY.get_sample_value(f"sluice_gateway_{name}", labels) or 0.0


async def test_metrics_report_lost_jobs_and_pauses(
    desk: Desk, worker: FakeWorker, other: FakeWorker
) -> None:
    lost, fenced = (
        metric("resumed_jobs_total", reason="lease_expired"),
        metric("fenced_messages_total"),
    )
    pauses = metric("resumption_pause_seconds_count")
    generation, claim = await begun(desk, worker)
    await worker.lose(claim)
    again = await other.claim_one()
    # Replies before the next attempt may be from a claim that still holds.
    await other.say(again, "b")
    await worker.say(claim, "not this")
    await other.say(again, "c")
    await take(generation, 3)
    assert metric("resumed_jobs_total", reason="lease_expired") == lost + 1
    assert metric("fenced_messages_total") == fenced + 1
    assert metric("resumption_pause_seconds_count") == pauses + 1


async def test_only_unfinished_sequences_resume(
    desk: Desk, worker: FakeWorker, other: FakeWorker
) -> None:
    generation = await desk.request(n=3, best_of=3)
    claim = await worker.claim_one()
    ended = worker.next_delta(claim, "a", choice=1, tokens=2, finish_reason=STOP)
    open_ = worker.next_delta(claim, "b", choice=2)
    await worker.send(GATEWAY, deltas=[ended, open_])
    await worker.lose(claim)
    again = await other.claim_one()
    assert again.job.resumption is not None
    assert again.job.resumption.sequences == [
        SequenceProgress([]),
        SequenceProgress([100, 101], STOP),
        SequenceProgress([100]),
    ]
    deltas = [other.next_delta(again, text, choice=choice) for text, choice in (("c", 0), ("d", 2))]
    await other.send(GATEWAY, deltas=deltas)
    await other.finish(again)
    replies = await take(generation, 5)
    assert texts(replies) == ["a", "b", "c", "d"]
    assert replies[-1].completion_tokens == 5


async def test_one_sequence_for_all_choices_resumes_once(
    desk: Desk, worker: FakeWorker, other: FakeWorker
) -> None:
    generation = await desk.request(n=2, best_of=2, sampling=GREEDY)
    claim = await worker.claim_one()
    deltas = [worker.next_delta(claim, "a", choice=choice, tokens=2) for choice in (0, 1)]
    await worker.send(GATEWAY, deltas=deltas)
    await worker.lose(claim)
    again = await other.claim_one()
    assert again.job.resumption == received(2)
    deltas = [other.next_delta(again, "b", choice=choice) for choice in (0, 1)]
    await other.send(GATEWAY, deltas=deltas)
    await other.finish(again)
    replies = await take(generation, 5)
    assert texts(replies) == ["a", "a", "b", "b"]
    assert replies[-1].completion_tokens == 6


async def test_candidates_are_ranked_across_workers(
    desk: Desk, worker: FakeWorker, other: FakeWorker
) -> None:
    generation = await desk.request(n=2, best_of=3)
    reported: list[Any] = []
    generation.on_reply = lambda index, message: reported.append((index, message))
    claim = await worker.claim_one()
    for choice in (0, 1, 2):
        said = worker.next_delta(claim, f"{choice}a", choice=choice, cumulative_logprob=-1.5)
        await worker.send(GATEWAY, deltas=[said])
    await worker.lose(claim)
    again = await other.claim_one()
    assert again.job.resumption is not None
    assert [each.cumulative_logprob for each in again.job.resumption.sequences] == [-1.5] * 3
    for choice in (0, 1, 2):
        await other.send(GATEWAY, deltas=[other.next_delta(again, f"{choice}b", choice=choice)])
    await other.finish(again, chosen=[2, 0])
    replies = await take(generation, 5)
    said_of = [(delta.choice, delta.text) for delta in replies[:4]]
    assert said_of == [(0, "2a"), (0, "2b"), (1, "0a"), (1, "0b")]
    assert isinstance(replies[4], JobFinished)
    assert len(reported) == 7
    assert generation.received_tokens[0] == 6


@pytest.mark.parametrize("chosen", [[], [0], [0, 0], [0, 3]])
async def test_invalid_choice_is_ignored(
    desk: Desk, worker: FakeWorker, other: FakeWorker, chosen: list[int]
) -> None:
    generation = await desk.request(n=2, best_of=2, ranking=Ranking.SUM)
    claim = await worker.claim_one()
    assert claim.job.is_ranked
    await worker.finish(claim, chosen=chosen)
    again = await other.claim_one()
    await other.finish(again, chosen=[1, 0])
    (finished,) = await take(generation, 1)
    assert finished.chosen == [1, 0]


async def test_end_with_contradicting_counts_is_ignored(
    desk: Desk, worker: FakeWorker, other: FakeWorker
) -> None:
    generation, claim = await begun(desk, worker)
    await worker.finish(claim, tokens=2)
    await finish_elsewhere(generation, other)


async def test_attempt_that_redis_issued_twice_is_replaced(
    desk: Desk, worker: FakeWorker, other: FakeWorker
) -> None:
    generation, claim = await begun(desk, worker)
    await other.say(JobClaim(claim.job, 1), "not this")
    await finish_elsewhere(generation, other)


async def test_time_of_a_resumed_response_includes_all_attempts(
    desk: Desk, worker: FakeWorker, other: FakeWorker
) -> None:
    asked = time.monotonic()
    generation, claim = await begun(desk, worker)
    await take(generation, 1)
    await asyncio.sleep(0.2)
    await worker.lose(claim)
    again = await other.claim_one()
    await other.finish(again, generation_ms=1.0)
    (finished,) = await take(generation, 1)
    assert 200 <= finished.generation_ms <= (time.monotonic() - asked) * 1000


# -- drained ---------------------------------------------------------------------------------------


async def test_job_of_a_stopping_worker_continues_at_once(
    desk: Desk, worker: FakeWorker, other: FakeWorker
) -> None:
    generation, claim = await begun(desk, worker)
    returned = messages.JobReturned(claim.job.handle, 1, ReturnReason.DRAINING, True)
    await worker.send(GATEWAY, returned=[returned])
    # Its lease has not run out.
    again = await finish_elsewhere(generation, other)
    assert not again.job.is_suspect


@pytest.mark.parametrize("reason", [ReturnReason.DRAINING, ReturnReason.PREEMPTED])
async def test_job_may_be_returned_any_number_of_times(
    desk: Desk, worker: FakeWorker, reason: ReturnReason
) -> None:
    generation = await desk.request()
    for _ in range(8):
        claim = await worker.claim_one()
        assert not claim.job.is_suspect
        await worker.give_back(claim, reason)
    claim = await worker.claim_one()
    await worker.finish(claim)
    assert isinstance((await take(generation, 1))[0], JobFinished)


async def test_job_that_kills_two_engines_is_poisonous(
    desk: Desk, worker: FakeWorker, redis: "Redis"
) -> None:
    generation, claim = await begun(desk, worker)
    await worker.give_back(claim, ReturnReason.ENGINE_DIED, has_progressed=True)
    again = await worker.claim_one()
    assert again.job.is_suspect
    await worker.give_back(again, ReturnReason.ENGINE_DIED)
    replies = await take(generation, 2)
    assert texts(replies) == ["a"]
    assert replies[-1].code is FailureCode.POISONOUS
    await eventually(lambda: nothing_left(redis, MODEL), what="the job being dropped")


async def test_job_that_progresses_after_each_death_is_not_poisonous(
    desk: Desk, worker: FakeWorker
) -> None:
    generation = await desk.request()
    for number in range(4):
        claim = await worker.claim_one()
        assert claim.job.is_suspect is (number > 0)
        await worker.say(claim, str(number))
        await worker.give_back(claim, ReturnReason.ENGINE_DIED, has_progressed=True)
    await worker.finish(await worker.claim_one())
    assert texts(await take(generation, 5)) == ["0", "1", "2", "3"]


# -- while it is unknown whether an attempt has ended ----------------------------------------------


@asynccontextmanager
async def held_up(
    operation: str, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[asyncio.Event, asyncio.Event]]:
    """Hold up an operation of the queue. Yield events: it has begun, it may continue."""
    original = getattr(JobQueue, operation)
    began, may_continue = asyncio.Event(), asyncio.Event()

    async def waiting(queue: JobQueue, *arguments: Any, **options: Any) -> Any:
        began.set()
        await may_continue.wait()
        return await original(queue, *arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr(JobQueue, operation, waiting)
        yield began, may_continue
        may_continue.set()


async def report_lost(redis: "Redis", claim: JobClaim) -> None:
    """Report to the gateway that a lease has expired."""
    notice = Frame("gw-other", 0, lost=[JobLost(claim.job.handle, claim.attempt)])
    await redis.xadd(keys.replies(GATEWAY), {"f": messages.encode(notice)})


async def test_worker_that_still_holds_its_job_is_followed_without_a_gap(
    desk: Desk, worker: FakeWorker, redis: "Redis", monkeypatch: pytest.MonkeyPatch
) -> None:
    generation, claim = await begun(desk, worker)
    async with held_up("requeue", monkeypatch) as (began, may_continue):
        await report_lost(redis, claim)
        await began.wait()
        await worker.say(claim, "b", "c")
        await desk.catch_up()
        assert texts(await take(generation, 1)) == ["a"]
        may_continue.set()
        assert texts(await take(generation, 2)) == ["b", "c"]
    await worker.say(claim, "d")
    await worker.finish(claim)
    assert texts(await take(generation, 2)) == ["d"]
    assert (await worker.queue.receipts([claim.job.id]))[0].state is JobState.ENDED


async def test_replies_during_a_requeue_count_only_if_it_fails(
    desk: Desk,
    worker: FakeWorker,
    other: FakeWorker,
    redis: "Redis",
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    generation, claim = await begun(desk, worker)
    async with held_up("requeue", monkeypatch) as (began, may_continue):
        await worker.lose(claim)
        await began.wait()
        await worker.say(claim, "not this")
        await desk.catch_up()
        may_continue.set()
        again = await other.claim_one()
    assert again.job.resumption == received(1)
    await other.say(again, "b")
    await other.finish(again)
    assert texts(await take(generation, 3)) == ["a", "b"]


async def test_job_that_ends_while_considered_lost_has_ended(
    desk: Desk, worker: FakeWorker, redis: "Redis", monkeypatch: pytest.MonkeyPatch
) -> None:
    generation, claim = await begun(desk, worker)
    async with held_up("requeue", monkeypatch) as (began, may_continue):
        await report_lost(redis, claim)
        await began.wait()
        await worker.say(claim, "b")
        await worker.finish(claim)
        may_continue.set()
        replies = await take(generation, 3)
    assert texts(replies) == ["a", "b"]
    assert isinstance(replies[-1], JobFinished)
    assert await nothing_left(redis, MODEL)


async def test_worker_that_overflows_the_buffer_is_fenced_off(
    desk: Desk, worker: FakeWorker, redis: "Redis", monkeypatch: pytest.MonkeyPatch
) -> None:
    generation, claim = await begun(desk, worker)
    async with held_up("requeue", monkeypatch) as (began, may_continue):
        await report_lost(redis, claim)
        await began.wait()
        for _ in range(9):
            deltas = [worker.next_delta(claim, "b") for _ in range(MAX_KEPT // 8)]
            await worker.send(GATEWAY, deltas=deltas)
        await desk.catch_up()
        may_continue.set()
        again = await worker.claim_one()
    assert again.attempt == 2
    assert again.job.resumption == received(1 + MAX_KEPT)
    await worker.finish(again)
    assert len(texts(await take(generation, MAX_KEPT + 2))) == MAX_KEPT + 1


async def test_frame_lost_while_its_job_is_considered_lost_is_detected(
    desk: Desk, worker: FakeWorker, redis: "Redis", monkeypatch: pytest.MonkeyPatch
) -> None:
    generation, claim = await begun(desk, worker)
    async with held_up("requeue", monkeypatch) as (began, may_continue):
        await report_lost(redis, claim)
        await began.wait()
        await worker.skip_frame(GATEWAY)
        await worker.send(GATEWAY)
        await desk.catch_up()
        may_continue.set()
        again = await worker.claim_one()
    assert (again.attempt, again.job.resumption) == (2, received(1))
    await worker.finish(again)
    assert texts(await take(generation, 2)) == ["a"]


@pytest.mark.parametrize("is_heard", [True, False], ids=["executed", "not executed"])
async def test_requeue_with_a_lost_reply_is_retried(
    desk: Desk,
    worker: FakeWorker,
    other: FakeWorker,
    monkeypatch: pytest.MonkeyPatch,
    is_heard: bool,
) -> None:
    requeue, tries = JobQueue.requeue, 0

    async def unreachable(queue: JobQueue, *arguments: Any, **options: Any) -> RequeueResult:
        nonlocal tries
        tries += 1
        if tries <= 3:
            if is_heard:
                await requeue(queue, *arguments, **options)
            raise RedisConnectionError
        return await requeue(queue, *arguments, **options)

    monkeypatch.setattr(JobQueue, "requeue", unreachable)
    generation, claim = await begun(desk, worker)
    await worker.lose(claim)
    await eventually(lambda: tries >= 2, what="the second try")
    await worker.say(claim, "not this")
    await finish_elsewhere(generation, other)
    await desk.look_after_jobs()
    assert (await worker.queue.receipts([claim.job.id]))[0].state is JobState.ENDED


async def test_late_revival_does_no_harm(
    desk: Desk,
    worker: FakeWorker,
    other: FakeWorker,
    redis: "Redis",
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    revive, tries = JobQueue.revive, 0
    has_resumed = asyncio.Event()

    async def without_reply(queue: JobQueue, *arguments: Any, **options: Any) -> int:
        nonlocal tries
        tries += 1
        if tries == 2:
            await has_resumed.wait()
        over = await revive(queue, *arguments, **options)
        if tries == 1:
            raise RedisConnectionError
        return over

    monkeypatch.setattr(JobQueue, "revive", without_reply)
    generation, claim = await begun(desk, worker)
    await worker.finish(claim, tokens=9)
    second = await other.claim_one()
    await eventually(lambda: tries == 2, what="the second try")
    await other.say(second, "b")
    assert texts(await take(generation, 2)) == ["a", "b"]
    has_resumed.set()
    third = await worker.claim_one()
    while third.job.resumption != received(2):
        third = await worker.claim_one()
    await worker.say(third, "c")
    await worker.finish(third)
    assert texts(await take(generation, 2)) == ["c"]
    assert await nothing_left(redis, MODEL)


@pytest.mark.parametrize("operation", ["requeue", "revive"])
async def test_job_cancelled_during_a_requeue_is_not_run_again(
    desk: Desk,
    worker: FakeWorker,
    redis: "Redis",
    monkeypatch: pytest.MonkeyPatch,
    operation: str,
) -> None:
    async with held_up(operation, monkeypatch) as (began, may_continue):
        generation, claim = await begun(desk, worker)
        if operation == "revive":
            await worker.finish(claim, tokens=9)
        else:
            await worker.lose(claim)
        await began.wait()
        await desk.dispatcher.cancel(generation)
        may_continue.set()
        await eventually(lambda: nothing_left(redis, MODEL), what="the job being dropped")
        await desk.look_after_jobs()
        assert await nothing_left(redis, MODEL)
    assert desk.dispatcher.jobs_in_flight == 0


async def test_job_that_cannot_be_requeued_fails_at_its_deadline(
    desk: Desk, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def unreachable(*_arguments: Any, **_options: Any) -> RequeueResult:
        raise RedisConnectionError

    monkeypatch.setattr(JobQueue, "requeue", unreachable)
    generation = await desk.request()
    await worker.lose(await worker.claim_one())
    later_ms = generation.jobs[0].deadline_ms + 1
    monkeypatch.setattr(clock, "now_ms", lambda: later_ms)
    assert await failure(generation) is FailureCode.DEADLINE_EXCEEDED


# -- what Redis has lost or another gateway owns ---------------------------------------------------


async def test_lost_job_missing_in_redis_is_revived(
    desk: Desk, worker: FakeWorker, other: FakeWorker, redis: "Redis"
) -> None:
    generation, claim = await begun(desk, worker)
    await take(generation, 1)
    await redis.flushall()
    await report_lost(redis, claim)
    again = await other.claim_one()
    assert (again.attempt, again.job.resumption) == (2, received(1))
    await other.finish(again)
    assert isinstance((await take(generation, 1))[0], JobFinished)


async def test_requeue_lost_in_a_failover_is_repeated(
    desk: Desk, worker: FakeWorker, other: FakeWorker, redis: "Redis"
) -> None:
    generation, claim = await begun(desk, worker)
    before = await redis.dump(keys.job(MODEL, claim.job.id))
    assert before is not None
    await worker.lose(claim)
    await eventually(lambda: redis.zcard(keys.queue(MODEL, "a")), what="the job being requeued")
    # The replica that takes over received only the claim, and the worker continues there.
    async with redis.pipeline(transaction=True) as fail_over:
        _ = fail_over.restore(keys.job(MODEL, claim.job.id), 0, before, replace=True)
        _ = fail_over.zrem(keys.queue(MODEL, "a"), claim.job.id)
        _ = fail_over.zrem(keys.active_tenants(MODEL), "a")
        _ = fail_over.set(keys.waiting(MODEL), 0)
        await fail_over.execute()
    await worker.queue.extend(worker.name, [LeaseReport(claim.job.id, 1, 1)], lease_ms=60_000)
    await worker.say(claim, "not this")
    await finish_elsewhere(generation, other, attempt=3)


async def test_job_that_another_gateway_took_over_is_dropped(
    desk: Desk, worker: FakeWorker, redis: "Redis"
) -> None:
    generation = await desk.request()
    claim = await worker.claim_one()
    await redis.hset(keys.job(MODEL, claim.job.id), "gateway", "gw-other")
    assert await failure(generation) is FailureCode.TAKEN_OVER
    await desk.look_after_jobs()
    assert not await redis.exists(keys.control(MODEL, worker.name)), "it is not cancelled"
    assert (await worker.queue.receipts([claim.job.id]))[0].state is JobState.RUNNING


async def test_job_that_ended_for_another_gateway_is_dropped(
    desk: Desk, worker: FakeWorker, redis: "Redis"
) -> None:
    generation = await desk.request()
    claim = await worker.claim_one()
    await redis.hset(keys.job(MODEL, claim.job.id), "gateway", "gw-other")
    await worker.drop(claim, tokens=3)
    assert await failure(generation) is FailureCode.TAKEN_OVER


async def test_job_of_a_sleeping_model_waits_for_the_queue_timeout(
    open_desk: Callable[..., Any], worker: FakeWorker, redis: "Redis"
) -> None:
    desk = await open_desk(queue_timeout_seconds=3600.0)
    await worker.announce(scales_to_zero=True)
    await redis.delete(keys.workers(MODEL))
    await desk.catalogue.refresh()
    held = await desk.request()
    desk.catalogue._served_at[MODEL] -= 2 * UNSERVED_SECONDS
    ticket = ticket_of(desk, held)
    first_check = ticket.check_at
    await eventually(lambda: ticket.check_at > first_check, what="the check of the waiting job")
    await desk.look_after_jobs()
    assert desk.dispatcher.jobs_in_flight == 1
    desk.dispatcher._lost_jobs._queue_timeout_seconds = 0.0  # It has waited for so long.
    assert await failure(held) is FailureCode.NO_WORKER
    await eventually(lambda: nothing_left(redis, MODEL), what="the job being dropped")


async def test_started_job_waits_for_a_worker_of_an_unserved_model(
    open_desk: Callable[..., Any], worker: FakeWorker, redis: "Redis"
) -> None:
    desk = await open_desk(queue_timeout_seconds=3600.0)
    generation, claim = await begun(desk, worker)
    await take(generation, 1)
    await redis.delete(keys.workers(MODEL))
    await desk.catalogue.refresh()
    fresh = await desk.request()
    await worker.lose(claim)
    ticket = ticket_of(desk, fresh)
    first_check = ticket.check_at
    await eventually(
        lambda: ticket.check_at > first_check, what="the gateway looking the job up in Redis"
    )
    await desk.look_after_jobs()
    assert desk.dispatcher.jobs_in_flight == 2, "another worker may start soon"
    desk.catalogue._served_at[MODEL] -= UNSERVED_SECONDS  # It has been unserved for so long.
    assert await failure(fresh) is FailureCode.NO_WORKER
    await desk.look_after_jobs()
    assert desk.dispatcher.jobs_in_flight == 1
    desk.dispatcher._lost_jobs._queue_timeout_seconds = 0.0  # It has waited for so long.
    assert await failure(generation) is FailureCode.WORKER_LOST
    await eventually(lambda: nothing_left(redis, MODEL), what="the job being dropped")


async def test_shed_job_ends_unless_it_has_started(
    desk: Desk, worker: FakeWorker, redis: "Redis"
) -> None:
    begun, waiting = await desk.request(), await desk.request()
    claim = await worker.claim_one()
    await worker.say(claim, "a")
    await take(begun, 1)
    handles = [generation.jobs[0].handle for generation in (begun, waiting)]
    shed = [*(ShedJob(GATEWAY, handle) for handle in handles), ShedJob("gw-gone", 1)]
    report = EnqueueReport(EnqueueResult.ENQUEUED, 1, 7.0, shed)
    await notify_shed(redis, "gw-other", report)
    assert await redis.ttl(keys.replies("gw-gone")) > 0
    (failed,) = await take(waiting, 1)
    assert (failed.code, failed.retry_after_seconds) == (FailureCode.SHED, 7.0)
    assert desk.dispatcher.jobs_in_flight == 1
