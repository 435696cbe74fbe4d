"""A gateway adopts the jobs of another one, and notices between gateways."""

from collections.abc import Callable
from typing import Any, NoReturn

import pytest
from redis.asyncio import Redis

from contract import keys, messages
from contract.messages import (
    CancelResponse,
    Delta,
    Follow,
    Frame,
    GenerationJob,
    JobFinished,
    JobMessage,
    JobStarted,
    ResponseGrown,
)
from contract.outcomes import FailureCode, JobState
from contract.queue import LeaseReport, LostJob
from gateway.completions.queue.dispatcher import Adopted
from gateway.completions.queue.generation import Generation
from tests.gateway.completions.queue.test_resumption import received
from tests.gateway.conftest import eventually, nothing_left
from tests.gateway.desk import MODEL, Desk, failure, take, texts
from tests.support.fake_worker import FakeWorker


def token(job: GenerationJob, text: str, start: int, choice: int = 0) -> Delta:
    """One token that another gateway has received."""
    return Delta(job.handle, 1, choice, start, text, [100 + start])


def unexpected(notice: object, *_arguments: object) -> NoReturn:
    """Fail on a notice."""
    raise AssertionError(notice)


def adopt(
    desk: Desk, *adopted: tuple[GenerationJob, list[JobMessage]], attempt: int = 1
) -> Generation:
    """Continue jobs, as a reader of their journal does."""
    generation = Generation(max_unread_bytes=1 << 20)
    for index, (job, history) in enumerate(adopted):
        generation.expect(index, job)
        for message in history:
            generation.push(index, message)
    given = [Adopted(job, history, attempt) for job, history in adopted]
    desk.dispatcher.adopt(MODEL, given, weight=1.0, generation=generation)
    return generation


async def test_adopted_job_continues_and_its_former_worker_is_fenced_off(
    open_desk: Callable[..., Any], worker: FakeWorker, redis: "Redis"
) -> None:
    dead, desk = await open_desk("gw-dead"), await open_desk("gw-heir")
    await dead.request()
    claim = await worker.claim_one()
    await dead.close()
    job = claim.job
    generation = adopt(desk, (job, [JobStarted(job.handle, 1, 3, 1, "class"), token(job, "a", 0)]))

    other = FakeWorker(redis, MODEL, name="fake-2")
    again = await other.claim_one()
    assert (again.job.id, again.job.gateway, again.attempt) == (job.id, "gw-heir", 2)
    assert again.job.resumption == received(1, prompt_tokens=3, cached_tokens=1)
    lost = await worker.queue.extend("fake-1", [LeaseReport(job.id, 1, 5)], lease_ms=1000)
    assert lost == [job.id]
    await other.say(again, "b")
    await other.finish(again)
    replies = await take(generation, 3)
    assert texts(replies) == ["a", "b"]
    assert replies[-1].completion_tokens == 2
    assert generation.jobs[0].id == job.id
    assert await nothing_left(redis, MODEL)


async def test_only_unfinished_jobs_are_run_again(
    desk: Desk, worker: FakeWorker, redis: "Redis"
) -> None:
    done, open_ = desk.job(), desk.job(n=2, best_of=3)
    end = JobFinished(done.handle, 1, 3, 1, 0)
    generation = adopt(
        desk,
        (done, [token(done, "a", 0), end]),
        (open_, [token(open_, "b", 0, choice=2), token(open_, "c", 0, choice=0)]),
        attempt=4,
    )
    assert desk.dispatcher.jobs_in_flight == 1
    claim = await worker.claim_one()
    assert (claim.job.id, claim.attempt) == (open_.id, 5)
    assert claim.job.resumption == received(1, 0, 1)
    await worker.say(claim, "d")
    await worker.finish(claim, chosen=[2, 0])
    replies = await take(generation, 6)
    assert texts(replies) == ["a", "b", "c", "d"]
    assert [reply.choice for reply in replies if isinstance(reply, Delta)] == [0, 0, 1, 1]
    assert [each.id for each in generation.jobs] == [done.id, open_.id]
    await desk.dispatcher.cancel(generation)
    assert await nothing_left(redis, MODEL)


async def test_history_that_contradicts_itself_is_refused(desk: Desk) -> None:
    good, bad = desk.job(), desk.job()
    with pytest.raises(ValueError, match=bad.id):
        adopt(desk, (good, []), (bad, [token(bad, "a", 0), token(bad, "b", 3)]))
    assert desk.dispatcher.jobs_in_flight == 0


async def test_former_owner_of_an_adopted_job_drops_it(
    open_desk: Callable[..., Any], worker: FakeWorker
) -> None:
    owner, heir = await open_desk("gw-owner"), await open_desk("gw-heir")
    lost = await owner.request()
    claim = await worker.claim_one()
    generation = adopt(heir, (claim.job, []))
    again = await worker.claim_one()
    assert await failure(lost) is FailureCode.TAKEN_OVER
    await worker.say(again, "a")
    assert texts(await take(generation, 1)) == ["a"]


@pytest.mark.parametrize("is_wanted", [True, False])
async def test_lost_jobs_of_a_dead_gateway_are_offered_for_adoption_first(
    open_desk: Callable[..., Any], worker: FakeWorker, redis: "Redis", is_wanted: bool
) -> None:
    dead, living = await open_desk("gw-dead"), await open_desk("gw-living")
    offered: list[tuple[str, LostJob]] = []

    async def on_orphan(model: str, lost: LostJob) -> bool:
        offered.append((model, lost))
        return is_wanted

    notices = living.dispatcher.notices
    notices.on_follow = notices.on_grown = notices.on_cancel = unexpected
    notices.on_orphan = on_orphan
    await dead.request()
    await dead.close()
    await redis.delete(keys.gateway_alive("gw-dead"))
    claim = await worker.claim_one()
    await worker.lose(claim)
    await eventually(lambda: offered, what="the job being offered")
    model, lost = offered[0]
    assert (model, lost.job_id, lost.gateway) == (MODEL, claim.job.id, "gw-dead")
    if is_wanted:
        assert (await worker.queue.receipts([claim.job.id]))[0].state is JobState.RUNNING
    else:
        await eventually(lambda: nothing_left(redis, MODEL), what="the lease being dropped")


async def test_notices_between_gateways_reach_their_handlers(desk: Desk, redis: "Redis") -> None:
    noticed: list[Any] = []
    stream = keys.replies(desk.dispatcher.gateway)
    notices = Frame(
        "gw-other",
        0,
        follows=[Follow("cmpl-1", "gw-other", 7)],
        grown=[ResponseGrown(8)],
        cancels=[CancelResponse("cmpl-2")],
    )
    # Notices without a handler are dropped.
    await redis.xadd(stream, {"f": messages.encode(notices)})
    await eventually(
        lambda: desk.dispatcher.reader.last_entry != b"0-0", what="the reply reader catching up"
    )
    handlers = desk.dispatcher.notices
    handlers.on_follow = handlers.on_grown = handlers.on_cancel = noticed.append
    handlers.on_orphan = unexpected
    entry = await redis.xadd(stream, {"f": messages.encode(notices)})
    await eventually(lambda: len(noticed) == 3, what="the three notices")
    assert noticed == [Follow("cmpl-1", "gw-other", 7), ResponseGrown(8), CancelResponse("cmpl-2")]
    assert desk.dispatcher.reader.last_entry == entry
