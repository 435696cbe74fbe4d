"""Replies reach their request, through a real Redis, from a worker that a test controls."""

import asyncio
import contextlib
import math
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import ANY

import msgspec
import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from common.tasks import end_task
from contract import keys, messages
from contract.messages import (
    Delta,
    Frame,
    JobFinished,
    JobLost,
    JobStarted,
    PromptScored,
    Resumption,
    SequenceProgress,
)
from contract.outcomes import FailureCode, FinishReason
from contract.queue import (
    JOBS_AT_ONCE,
    EnqueueReport,
    EnqueueResult,
    JobClaim,
    JobQueue,
    LeaseReport,
)
from contract.tier import ServiceTier
from gateway.completions.queue import reader as reading
from gateway.completions.queue.dispatcher import require_enqueued
from gateway.completions.queue.generation import Generation
from gateway.completions.queue.presence import FRESH_SECONDS, LEFT_SECONDS
from gateway.completions.queue.ticket import MAX_REVIVALS
from gateway.platform.redis_client import connect
from gateway.records.errors import (
    ApiError,
    ErrorStyle,
    OverloadedError,
    StoreUnavailableError,
    TenantQueueFullError,
)
from tests.gateway.conftest import eventually, nothing_left
from tests.gateway.desk import GATEWAY, MODEL, Desk, begun, take, texts
from tests.support.cases import all_cases
from tests.support.fake_worker import FakeWorker, delta
from tests.support.patience import PATIENCE_SECONDS
from tests.support.redis_server import RedisServer


async def test_replies_come_in_order_and_end_with_the_job(
    desk: Desk, worker: FakeWorker, redis: "Redis"
) -> None:
    generation = await desk.request()
    claim = await worker.claim_one()
    await worker.say(claim, "a", "b", "c", finish=FinishReason.STOP)
    await worker.finish(claim, tokens=3)

    replies = await take(generation, 4)

    assert texts(replies) == ["a", "b", "c"]
    assert isinstance(replies[-1], JobFinished)
    assert desk.dispatcher.jobs_in_flight == 0
    assert await nothing_left(redis, MODEL)


@pytest.mark.parametrize("is_away", [False, True], ids=["client gone", "Redis gone"])
async def test_jobs_of_a_request_that_ends_while_enqueueing_are_cancelled_later(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, *, is_away: bool
) -> None:
    queue = desk.catalogue.queue(MODEL)
    enqueue = JobQueue._enqueue

    async def first_part_only(*arguments: Any, admitted: int) -> EnqueueReport:
        if not admitted and is_away:
            raise RedisConnectionError
        if not admitted:
            await asyncio.Event().wait()
        return await enqueue(*arguments, admitted=admitted)

    async def is_enqueued() -> bool:
        return (await queue.status()).waiting_jobs == JOBS_AT_ONCE

    monkeypatch.setattr(JobQueue, "_enqueue", first_part_only)
    generation = Generation(max_unread_bytes=1)
    jobs = [desk.job() for _ in range(JOBS_AT_ONCE + 1)]
    work = desk.dispatcher.enqueue(MODEL, jobs, weight=1.0, generation=generation)
    task = asyncio.create_task(work)
    await eventually(is_enqueued, what="the first part")
    if not is_away:
        task.cancel()
    with pytest.raises(StoreUnavailableError if is_away else asyncio.CancelledError):
        await task
    assert await is_enqueued()
    await desk.dispatcher.cancel(generation)
    assert (await queue.status()).waiting_jobs == 0


async def test_replies_of_one_frame_find_their_requests(desk: Desk, worker: FakeWorker) -> None:
    generations = [await desk.request(), await desk.request(2)]
    claims = await worker.claim(3)
    await worker.send(GATEWAY, deltas=[delta(claim, str(i)) for i, claim in enumerate(claims)])
    assert texts(await take(generations[0], 1)) == ["0"]
    async with asyncio.timeout(PATIENCE_SECONDS):
        replies = await generations[1].replies()
    assert [(index, message.text) for index, message in replies if isinstance(message, Delta)] == [
        (0, "1"),
        (1, "2"),
    ]


async def test_duplicate_frame_is_dropped(desk: Desk, worker: FakeWorker) -> None:
    generation = await desk.request()
    claim = await worker.claim_one()
    for number in (1, 1, 2, 2, 2):
        await worker.send(GATEWAY, number=number, deltas=[delta(claim, f"{number}")])
    await worker.send(GATEWAY, number=3, finished=[JobFinished(claim.job.handle, 1, 3, 0, 0)])
    assert texts(await take(generation, 3)) == ["1", "2"]


async def test_jobs_of_a_lost_frame_resume_after_the_received_tokens(
    desk: Desk, worker: FakeWorker, redis: "Redis"
) -> None:
    generation, claim = await begun(desk, worker)
    await worker.skip_frame(GATEWAY)
    await worker.say(claim, "lost", "lost")

    again = await worker.claim_one()

    assert again.attempt == 2
    assert again.job.resumption == Resumption([SequenceProgress([100])], generation_ms=ANY)
    report = LeaseReport(claim.job.id, claim.attempt, 3)
    assert await worker.queue.extend(worker.name, [report], lease_ms=1000) == [claim.job.id]
    await worker.say(again, "b")
    await worker.finish(again)
    assert texts(await take(generation, 3)) == ["a", "b"]
    assert await nothing_left(redis, MODEL)


async def test_job_whose_first_tokens_were_lost_starts_again(
    desk: Desk, worker: FakeWorker
) -> None:
    generation = await desk.request()
    claim = await worker.claim_one()
    await worker.skip_frame(GATEWAY)
    await worker.send(GATEWAY, prompts=[PromptScored(claim.job.handle, 1, [])])
    again = await worker.claim_one()
    assert (again.attempt, again.job.resumption) == (2, None)
    await worker.say(again, "a")
    await worker.finish(again)
    assert texts(await take(generation, 2)) == ["a"]


async def test_job_with_too_many_lost_frames_fails(
    desk: Desk, worker: FakeWorker, redis: "Redis"
) -> None:
    generation, claim = await begun(desk, worker)
    assert texts(await take(generation, 1)) == ["a"]
    for _ in range(MAX_REVIVALS):
        await worker.skip_frame(GATEWAY)
        await worker.say(claim, "lost")
        claim = await worker.claim_one()
        await worker.send(
            GATEWAY, started=[JobStarted(claim.job.handle, claim.attempt, 3, 0, "class")]
        )
    await worker.skip_frame(GATEWAY)
    await worker.say(claim, "lost")
    _, end = await take(generation, 2)
    assert end.code is FailureCode.REPLIES_LOST
    control = keys.control(MODEL, worker.name)
    await eventually(lambda: redis.llen(control), what="the cancellation being sent")
    await worker.drop(claim)
    assert await nothing_left(redis, MODEL)


async def test_lost_frame_does_not_affect_other_workers_and_later_jobs(
    desk: Desk, worker: FakeWorker, redis: "Redis"
) -> None:
    other_worker = FakeWorker(redis, MODEL, name="fake-2")
    first = await desk.request()
    claim = await other_worker.claim_one()
    await other_worker.say(claim, "other")
    waiting = await desk.request()
    await worker.skip_frame(GATEWAY)
    await worker.send(GATEWAY)
    await desk.catch_up()
    later = await desk.request()

    await other_worker.say(claim, "goes on")
    assert texts(await take(first, 2)) == ["other", "goes on"]
    claims = await other_worker.claim(1)
    await other_worker.say(claims[0], "unheard before the gap")
    assert texts(await take(waiting, 1)) == ["unheard before the gap"]
    claims = await worker.claim(1)
    await worker.say(claims[0], "after the gap")
    assert texts(await take(later, 1)) == ["after the gap"]


async def test_worker_that_restarts_its_frame_numbers_is_accepted(
    desk: Desk, worker: FakeWorker
) -> None:
    generation = await desk.request()
    claim = await worker.claim_one()
    for number in (1, 2, 3, 1, 2):
        await worker.send(GATEWAY, number=number, deltas=[delta(claim, f"{number}")])
    assert texts(await take(generation, 5)) == ["1", "2", "3", "1", "2"]


async def test_frame_numbers_of_the_workers_that_sent_last_are_known(
    desk: Desk, worker: FakeWorker, redis: "Redis", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "MOST_WORKERS", 2)
    generation = await desk.request()
    claim = await worker.claim_one()
    for name in ("w1", "w2", "w3"):
        await worker.say(claim, name)
        await FakeWorker(redis, MODEL, name=name).send(GATEWAY, deltas=[])
    assert texts(await take(generation, 3)) == ["w1", "w2", "w3"]
    await desk.catch_up()
    assert list(desk.dispatcher.reader._frame_numbers) == [worker.name, "w3"]


async def test_unreadable_frame_is_skipped_and_the_loops_continue(
    desk: Desk, worker: FakeWorker, redis: "Redis"
) -> None:
    generation = await desk.request()
    claim = await worker.claim_one()
    stream = keys.replies(GATEWAY)
    await redis.xadd(stream, {"f": b"\xc1 not msgpack"})
    await redis.xadd(stream, {"f": messages.encode(["of", "another", "version"])})
    await redis.xadd(stream, {"g": b"another field"})
    await worker.say(claim, "a")
    assert texts(await take(generation, 1)) == ["a"]


async def test_reply_to_an_unknown_handle_is_dropped(desk: Desk, worker: FakeWorker) -> None:
    generation = await desk.request()
    claim = await worker.claim_one()
    await worker.send(GATEWAY, deltas=[Delta(10**6, 1, 0, 0, "nobody's", []), delta(claim, "mine")])
    assert texts(await take(generation, 1)) == ["mine"]


async def test_reply_of_a_stale_attempt_is_dropped(desk: Desk, worker: FakeWorker) -> None:
    generation = await desk.request()
    first = await worker.claim_one()
    await worker.lose(first)
    second = await worker.claim_one()
    assert second.attempt == 2
    await worker.say(second, "new")
    await worker.say(first, "old")
    await worker.finish(first)
    await worker.say(second, "newer")
    assert texts(await take(generation, 2)) == ["new", "newer"]


async def test_newer_attempt_is_followed_if_nothing_was_received(
    desk: Desk, worker: FakeWorker
) -> None:
    generation = await desk.request()
    claim = await worker.claim_one()
    await worker.say(JobClaim(claim.job, 2), "from attempt 2")
    await worker.say(claim, "from attempt 1")
    await worker.finish(JobClaim(claim.job, 2))
    assert texts(await take(generation, 2)) == ["from attempt 2"]


@pytest.mark.parametrize("start", [0, 2], ids=["overlap", "gap"])
async def test_newer_attempt_with_gap_or_overlap_is_ignored(
    desk: Desk, worker: FakeWorker, start: int
) -> None:
    generation, claim = await begun(desk, worker)
    stray = delta(JobClaim(claim.job, 2), "not this", start=start, token_ids=[7])
    await worker.send(GATEWAY, deltas=[stray])
    again = await worker.claim_one()
    assert again.attempt == 3
    await worker.say(again, "b")
    await worker.finish(again)
    assert texts(await take(generation, 3)) == ["a", "b"]


@pytest.mark.parametrize(
    "stray",
    [{"choice": 1}, {"choice": -1}, {"token_ids": [1 << 40]}, {"start": 7}],
    ids=["choice", "negative choice", "token", "start"],
)
async def test_invalid_delta_is_ignored(
    desk: Desk, worker: FakeWorker, stray: dict[str, Any]
) -> None:
    generation = await desk.request()
    claim = await worker.claim_one()
    await worker.send(GATEWAY, deltas=[delta(claim, "not this", **stray)])
    again = await worker.claim_one()
    assert (again.attempt, again.job.resumption) == (2, None)
    await worker.say(again, "a")
    await worker.finish(again)
    assert texts(await take(generation, 2)) == ["a"]


async def test_newer_attempt_that_continues_exactly_is_followed(
    desk: Desk, worker: FakeWorker
) -> None:
    generation, claim = await begun(desk, worker)
    other = FakeWorker(worker._redis, MODEL, name="fake-2")
    rest = msgspec.structs.replace(claim.job, resumption=Resumption([SequenceProgress([100])]))
    await other.say(JobClaim(rest, 2), "b")
    await worker.say(claim, "not this")
    await other.finish(JobClaim(rest, 2))
    assert texts(await take(generation, 3)) == ["a", "b"]


async def test_overflow_of_an_unread_request_cancels_its_jobs(
    desk: Desk, worker: FakeWorker, redis: "Redis"
) -> None:
    generation = await desk.request(2, max_unread_bytes=1000)
    beside = await desk.request()
    claims = await worker.claim(3)
    for _ in range(20):
        await worker.send(GATEWAY, deltas=[delta(claims[0], "x" * 40), delta(claims[2], "y")])
    assert len(texts(await take(beside, 20))) == 20
    assert generation.overflowed
    assert desk.dispatcher.jobs_in_flight == 1
    control = keys.control(MODEL, worker.name)
    await eventually(lambda: redis.llen(control), what="the cancellation being sent")
    cancelled = set(await redis.lrange(control, 0, -1))
    assert cancelled == {claim.job.id.encode() for claim in claims[:2]}


async def test_cancelled_request_leaves_no_keys(
    desk: Desk, worker: FakeWorker, redis: "Redis"
) -> None:
    generation = await desk.request(3)
    (claim,) = await worker.claim(1)
    await desk.dispatcher.cancel(generation)
    assert desk.dispatcher.jobs_in_flight == 0
    assert await redis.lrange(keys.control(MODEL, worker.name), 0, -1) == [claim.job.id.encode()]
    await worker.drop(claim)
    assert await nothing_left(redis, MODEL)
    await desk.dispatcher.cancel(generation)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"max_waiting_jobs": 3}, OverloadedError),
        ({"max_waiting_jobs_of_tenant": 3}, TenantQueueFullError),
    ],
    ids=["model", "tenant"],
)
async def test_refused_request_leaves_no_ticket(
    open_desk: Callable[..., Any], settings: dict[str, int], expected: type[Exception]
) -> None:
    desk = await open_desk(**settings)
    await desk.request(2)
    with pytest.raises(expected):
        await desk.request(2)
    assert desk.dispatcher.jobs_in_flight == 2
    await desk.request(1)


async def test_notices_of_gateways_do_not_count_as_frames(
    desk: Desk, worker: FakeWorker, redis: "Redis"
) -> None:
    generation, claim = await begun(desk, worker)
    notice = Frame("gw-other", 0, lost=[JobLost(10**6, 1)])
    await redis.xadd(keys.replies(GATEWAY), {"f": messages.encode(notice)})
    await worker.say(claim, "b")
    assert texts(await take(generation, 2)) == ["a", "b"]


@pytest.mark.parametrize("age_seconds", [FRESH_SECONDS + 0.1, math.inf])
async def test_job_is_enqueued_after_a_heartbeat_that_workers_find(
    desk: Desk, worker: FakeWorker, redis: "Redis", age_seconds: float
) -> None:
    await desk.close()  # It sends no more heartbeats.
    await redis.delete(keys.gateway_alive(GATEWAY))
    desk.dispatcher.presence._announced_at = time.monotonic() - age_seconds
    await desk.request()
    assert await redis.ttl(keys.gateway_alive(GATEWAY)) > 0


async def test_goodbye_removes_the_heartbeat(
    desk: Desk, worker: FakeWorker, redis: "Redis"
) -> None:
    await begun(desk, worker)
    assert await redis.exists(keys.gateway_alive(GATEWAY))
    await desk.close()
    await desk.dispatcher.aclose()
    assert not await redis.exists(keys.gateway_alive(GATEWAY))
    assert 0 < await redis.ttl(keys.replies(GATEWAY)) <= LEFT_SECONDS


@pytest.mark.parametrize("step", ["beat", "reclaim", "catalogue"])
async def test_loops_end_although_redis_swallows_the_cancellation(
    redis: "Redis", monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    entered = asyncio.Event()

    async def swallow(*_arguments: Any, **_options: Any) -> None:
        entered.set()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(10)

    desk = Desk(redis, GATEWAY)
    loop = desk.dispatcher.run
    if step == "catalogue":
        loop = desk.catalogue.run
        monkeypatch.setattr(desk.catalogue, "refresh", swallow)
    elif step == "reclaim":
        monkeypatch.setattr(desk.dispatcher._lost_jobs, step, swallow)
    else:
        monkeypatch.setattr(desk.dispatcher, step, swallow)
    task = asyncio.create_task(loop())
    await entered.wait()
    task.cancel()
    done, _ = await asyncio.wait({task}, timeout=PATIENCE_SECONDS)
    assert done


async def test_no_connection_outlives_a_client_that_closes_at_once(
    redis_server: RedisServer,
) -> None:
    client = connect(redis_server.url, max_connections=4)
    dispatcher = Desk(client, GATEWAY).dispatcher
    reading = asyncio.create_task(dispatcher.reader.run())
    for _ in range(3):
        await asyncio.sleep(0)
    await end_task(reading)
    await client.aclose()
    pool: Any = client.connection_pool
    connections = [*pool._in_use_connections, *pool._available_connections]
    # Enough for a connection that is still being opened.
    await asyncio.sleep(0.05)
    assert not any(each.is_connected for each in connections)


@all_cases(
    ("result", "status", "reason"),
    [
        (EnqueueResult.MODEL_FULL, 503, "queue_full"),
        (EnqueueResult.TOO_LATE, 503, "wait_too_long"),
        (EnqueueResult.TENANT_FULL, 429, "concurrency"),
    ],
)
def test_refusal_by_a_queue_says_when_and_whose_it_is(
    result: EnqueueResult, status: int, reason: str
) -> None:
    with pytest.raises(ApiError) as caught:
        require_enqueued(EnqueueReport(result, 256, 90.5, []), "m", ServiceTier.FLEX, 9)
    error = caught.value
    error.concerns("another", "default")
    # Clients of OpenAI ignore a longer Retry-After; the estimate has no bound.
    assert (error.status, error.headers()["retry-after"]) == (status, "60")
    for style in ErrorStyle:
        assert error.body(style)["error"]["availability"] == {
            "reason": reason,
            "model": "m",
            "tier": "flex",
            "position": 257,
            "estimated_wait_seconds": 90.5,
        }
