"""Every reader of a response gets all of it, wherever its owner is."""

import gc
import weakref

import pytest
from redis.asyncio import Redis

from common.not_none import not_none
from contract import keys
from contract.messages import JobStarted
from contract.outcomes import FailureCode
from contract.queue import LostJob
from gateway.completions.stored import owned
from gateway.completions.stored import reader as reading
from gateway.completions.stored.store import ResponseStore
from gateway.limits.replies import RequestState, RequestStatus
from tests.gateway.completions.stored.conftest import OpenHouse
from tests.gateway.completions.stored.house import (
    TENANT,
    House,
    Reader,
    begun,
    plain,
    settled_records,
    state_is,
    usage_records,
)
from tests.gateway.conftest import eventually
from tests.support.fake_worker import FakeWorker
from tests.support.patience import PATIENCE_SECONDS


async def test_reader_at_another_gateway_gets_what_the_first_one_gets(
    first: House, second: House, worker: FakeWorker
) -> None:
    request = await first.submit()
    direct = Reader(request.generation)
    claim = await worker.claim_one()
    await worker.send("gw1", started=[JobStarted(claim.job.handle, 1, 3, 0, "class")])
    await worker.say(claim, "a", "b")
    await direct.until_text("ab")

    attachment = await second.attach(request.id)
    reader = await Reader(attachment.generation).until_text("ab")
    await worker.say(claim, "c")
    await reader.until_text("abc")
    await worker.conclude(claim, "d")
    await direct.to_the_end()
    await first.responses.of(request.settlement).finish()
    await reader.to_the_end()

    assert plain(reader.replies) == plain(direct.replies)
    assert attachment.completion.head() == request.completion.head()
    await attachment.aclose()


async def test_attachment_is_freed_when_its_reader_leaves(
    first: House, second: House, worker: FakeWorker
) -> None:
    request = await first.submit()
    await worker.say(await worker.claim_one(), "a")
    attachment = await second.attach(request.id)
    await Reader(attachment.generation).until_text("a")
    left = weakref.ref(attachment)
    # A reader holds a page of the response: it does not wait for the collection of cycles.
    gc.disable()
    try:
        await attachment.aclose()
        del attachment
        assert left() is None
    finally:
        gc.enable()


async def test_only_what_needs_a_head_reads_it(
    first: House, second: House, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "REPEAT_SECONDS", 0.02)
    request, claim = await begun(first, worker, is_background=True)
    stored = await second.find(request.id)
    looks, status = 0, ResponseStore.status

    async def never(*_: object, **__: object) -> None:
        raise AssertionError("a whole head was read")

    async def counted(store: ResponseStore, *of: str) -> RequestStatus | None:
        nonlocal looks
        looks += 1
        return await status(store, *of)

    monkeypatch.setattr(ResponseStore, "read", never)
    monkeypatch.setattr(ResponseStore, "status", counted)
    reader = await second.responses.attach(stored)
    await eventually(lambda: looks > 5, what="following the response")
    assert not any(task.done() for task in reader._tasks)
    # Its lost job is found by a gateway that does not own the response.
    lost = LostJob(claim.job.id, TENANT, "gw1", claim.job.handle, 1)
    assert await second.dispatcher.notices.on_orphan("m", lost)
    assert (await second.responses.cancel(stored)).state is RequestState.CANCELLED
    assert not await second.responses.settled(stored)
    await reader.aclose()


async def test_follower_does_not_wait_for_the_journal_interval(
    open_house: OpenHouse, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "REPEAT_SECONDS", 3600.0)
    first = await open_house("gw1", journal_seconds=3600.0)
    second = await open_house("gw2")
    request = await first.submit()
    claim = await worker.claim_one()
    readers = [Reader((await house.attach(request.id)).generation) for house in (first, second)]
    reported = ""
    for letter in "abcde":
        await worker.say(claim, letter)
        reported += letter
        for reader in readers:
            await reader.until_text(reported)


async def test_finished_response_is_read_again_without_running_anything(
    first: House, second: House, worker: FakeWorker, redis: "Redis"
) -> None:
    request = await first.submit(prompts=2, n=2)
    direct = Reader(request.generation)
    for claim in await worker.claim(2):
        for choice in (0, 1):
            said = worker.next_delta(claim, f"{choice}", choice=choice, finish_reason="stop")
            await worker.send("gw1", deltas=[said])
        await worker.finish(claim)
    await direct.to_the_end(2)
    await first.responses.of(request.settlement).finish()
    await state_is(second, request.id, RequestState.FINISHED)
    for house in (first, second):
        attachment = await house.attach(request.id)
        reader = await Reader(attachment.generation).to_the_end(2)
        assert plain(reader.replies) == plain(direct.replies)
        await attachment.aclose()
    assert await redis.pttl(keys.journal(request.id)) <= 60_000
    assert await redis.pttl(keys.content(request.id)) > 0
    assert len(await usage_records(redis)) == 1


async def test_ranked_response_is_read_as_its_choices(
    first: House, second: House, worker: FakeWorker
) -> None:
    request = await first.submit(n=1, best_of=3)
    direct = Reader(request.generation)
    claim = await worker.claim_one()
    for candidate in range(3):
        said = worker.next_delta(claim, f"text {candidate}", choice=candidate, finish_reason="stop")
        await worker.send("gw1", deltas=[said])
    attachment = await second.attach(request.id)
    await worker.finish(claim, chosen=[1])
    await direct.to_the_end()
    await first.responses.of(request.settlement).finish()

    reader = await Reader(attachment.generation).to_the_end()

    assert reader.text == "text 1"
    assert plain(reader.replies) == plain(direct.replies)
    await attachment.aclose()


async def test_follower_keeps_an_abandoned_response_running(
    first: House, second: House, worker: FakeWorker, redis: "Redis"
) -> None:
    request = await first.submit()
    claim = await worker.claim_one()
    await worker.say(claim, "a")
    attachment = await second.attach(request.id)
    reader = await Reader(attachment.generation).until_text("a")
    await eventually(lambda: first.responses._owned.by_id[request.id]._followers, what="Follow")

    first.responses.of(request.settlement).leave()
    await worker.conclude(claim, "b")
    await reader.to_the_end()

    assert reader.text == "ab"
    await attachment.aclose()
    ((request_id, record),) = (await settled_records(redis, 1)).items()
    assert request_id == request.id
    assert (record.outcome, record.completion_tokens) == ("finished", 2)


async def test_response_ends_when_its_last_reader_leaves(
    first: House, second: House, worker: FakeWorker, redis: "Redis"
) -> None:
    request = await first.submit()
    claim = await worker.claim_one()
    attachment = await second.attach(request.id)
    await worker.say(claim, "a")
    reader = await Reader(attachment.generation).until_text("a")
    first.responses.of(request.settlement).leave()
    await worker.say(claim, "b")
    await reader.until_text("ab")
    assert not request.settlement.has_ended

    await attachment.aclose()

    control = keys.control("m", worker.name)
    await eventually(lambda: redis.llen(control), what="the cancellation being sent")
    await worker.drop(claim, tokens=1)
    await state_is(second, request.id, RequestState.PAUSED)


async def test_failure_reaches_every_reader(
    first: House, second: House, worker: FakeWorker
) -> None:
    request = await first.submit()
    claim = await worker.claim_one()
    await worker.say(claim, "a")
    attachment = await second.attach(request.id)
    await worker.fail(claim, FailureCode.ENGINE_ERROR, "broken")
    direct = await Reader(request.generation).to_the_end()
    first.responses.of(request.settlement).fail(RuntimeError())

    for reader in (
        await Reader(attachment.generation).to_the_end(),
        await Reader((await second.attach(request.id)).generation).to_the_end(),
    ):
        assert reader.text == "a"
        assert reader.failure is not None
        assert reader.failure.code is FailureCode.ENGINE_ERROR
    assert direct.failure is not None


async def test_response_of_another_tenant_is_not_found(first: House, worker: FakeWorker) -> None:
    request = await first.submit()
    assert await first.responses.find(request.id, tenant_id=TENANT) is not None
    assert await first.responses.find(request.id, tenant_id="other") is None
    assert await first.responses.find("cmpl-unknown", tenant_id=TENANT) is None


async def test_request_without_storage_leaves_nothing_and_ends_when_abandoned(
    first: House, worker: FakeWorker, redis: "Redis"
) -> None:
    request = await first.submit(is_kept=False)
    first.responses.of(request.settlement).leave()

    assert request.id in await settled_records(redis, 1)
    assert await first.responses.find(request.id, tenant_id=TENANT) is None


async def test_first_token_of_a_background_response_changes_its_status(
    first: House, second: House, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owned, "UNWRITTEN_SECONDS", 10 * PATIENCE_SECONDS)
    request, _ = await begun(first, worker, is_background=True)

    async def has_begun() -> bool:
        return (await second.find(request.id)).has_begun

    await eventually(has_begun, what="the status")


async def test_discarded_response_is_dropped(
    first: House, worker: FakeWorker, redis: "Redis"
) -> None:
    request = await first.submit()
    await not_none(first.responses.discard(request.id))

    async def is_gone() -> bool:
        return not await redis.exists(keys.content(request.id), keys.journal(request.id))

    await eventually(is_gone, what="the response being dropped")
    # The next journal entry would restore it.
    other = await first.submit()
    while not (claim := await worker.claim_one()).job.id.startswith(other.id):
        pass
    await worker.say(claim, "a")
    await eventually(lambda: redis.exists(keys.journal(other.id)), what="a journal")
    assert await is_gone()
