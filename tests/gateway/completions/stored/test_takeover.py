"""A response outlives its owner and its readers."""

import asyncio
import gc
import weakref
from typing import Any
from unittest.mock import AsyncMock, Mock

import msgspec
import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from common.not_none import not_none
from common.tasks import end_task
from contract import keys
from contract.affinity import class_affinity
from contract.messages import JobStarted
from contract.outcomes import FailureCode, FinishReason
from contract.queue import JobClaim
from gateway.completions.endpoints.stored import StoredCompletions
from gateway.completions.queue import lost_jobs
from gateway.completions.sealing import Sealer
from gateway.completions.settlement import Ending
from gateway.completions.stored import history, service
from gateway.completions.stored.history import frame_messages
from gateway.completions.stored.owned import OwnedResponse
from gateway.completions.stored.store import ResponseStore
from gateway.dialects.endpoint import CHATS
from gateway.limits.replies import RequestEnd, RequestState
from gateway.limits.store import QuotaStore
from gateway.platform.redis_client import MeasuredConnection
from gateway.records.errors import RateLimitError, StoreUnavailableError, queue_unavailable
from gateway.records.limits import Limits
from gateway.records.usage_record import Counts, Outcome
from tests.gateway.completions.stored.conftest import OpenHouse
from tests.gateway.completions.stored.house import (
    PROMPT,
    TENANT,
    House,
    Reader,
    Submitted,
    begun,
    counts_of,
    settled,
    settled_records,
    state_is,
    usage_records,
)
from tests.gateway.conftest import eventually, nothing_left
from tests.gateway.limits.building import counted_bytes
from tests.support.fake_worker import FakeWorker
from tests.support.patience import PATIENCE_SECONDS

LATE = 3600.0
"""A long journal interval: only urgent entries are written."""


@pytest.mark.parametrize("journal_seconds", [0.02, LATE], ids=["journal", "reply stream"])
async def test_response_continues_at_another_gateway_when_its_owner_dies(
    open_house: OpenHouse, worker: FakeWorker, redis: "Redis", journal_seconds: float
) -> None:
    first = await open_house("gw1", journal_seconds=journal_seconds)
    second = await open_house("gw2")
    request = await first.submit()
    direct = Reader(request.generation)
    claim = await worker.claim_one()
    await worker.send("gw1", started=[JobStarted(claim.job.handle, 1, 3, 2, "class")])
    await worker.say(claim, "a", "b")
    await direct.until_text("ab")
    await first.kill()
    await worker.say(claim, "c")

    attachment = await second.attach(request.id)
    reader = await Reader(attachment.generation).until_text("abc")
    again = await worker.claim_one()

    resumption = again.job.resumption
    assert resumption is not None
    assert [each.token_ids for each in resumption.sequences] == [[100, 101, 102]]
    assert (resumption.prompt_tokens, resumption.cached_tokens) == (3, 2)
    assert again.job.affinity.startswith(class_affinity("class"))
    await worker.say(claim, "late")
    await worker.send("gw2", started=[JobStarted(again.job.handle, 2, 3, 2, "other")])
    await worker.conclude(again, "d")
    await reader.to_the_end()
    assert reader.text == "abcd"
    await attachment.aclose()
    assert await settled(redis, request.id) == [("finished", 3, 4)]
    (record,) = (await usage_records(redis)).values()
    assert (record.exactness_class, record.class_crossings) == ("class, other", 1)
    await state_is(second, request.id, RequestState.FINISHED)
    assert await nothing_left(redis, "m")


async def test_reader_gets_the_end_once_it_is_settled_even_if_the_owner_dies_before(
    first: House, second: House, worker: FakeWorker, redis: "Redis", monkeypatch: pytest.MonkeyPatch
) -> None:
    request, claim = await begun(first, worker, "a")
    reader = Reader((await second.attach(request.id)).generation)
    await reader.until_text("a")
    written = asyncio.Event()

    async def never_settle(*_: Any, **__: Any) -> None:
        written.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(request.settlement, "finish", never_settle)
    first.responses.of(request.settlement).leave()
    await worker.conclude(claim, "b")
    async with asyncio.timeout(PATIENCE_SECONDS):
        await written.wait()
    await first.kill()
    await reader.to_the_end()
    assert reader.text == "ab"
    assert await settled(redis, request.id) == [("finished", 3, 2)]


@pytest.mark.parametrize("at", ["gw2", "gw3"])
async def test_takeover_that_failed_halfway_loses_no_reply(
    open_house: OpenHouse, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    houses = {name: await open_house(name, journal_seconds=LATE) for name in ("gw1", "gw2", "gw3")}
    request, _ = await begun(houses["gw1"], worker, "a", "b")
    await houses["gw1"].kill()
    with monkeypatch.context() as patch:
        patch.setattr(ResponseStore, "adopt", AsyncMock(side_effect=RedisConnectionError))
        with pytest.raises(RedisConnectionError):
            await houses["gw2"].attach(request.id)
    if at == "gw3":
        await houses["gw2"].kill()

    reader = Reader((await houses[at].attach(request.id)).generation)
    again = await worker.claim_one()

    # The client may have received both, in events whose numbers depend on the messages.
    await reader.until_text("ab")
    assert again.job.resumption is not None
    await worker.conclude(again, "c")
    await reader.to_the_end()
    assert [reply.message.text for reply in reader.replies[:2]] == ["a", "b"]  # type: ignore[union-attr]
    assert reader.text == "abc"


async def test_reply_stream_of_a_dead_gateway_is_read_once_for_all_its_responses(
    open_house: OpenHouse, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await open_house("gw1", journal_seconds=LATE)
    second = await open_house("gw2")
    read = Mock(side_effect=frame_messages)
    monkeypatch.setattr(history, "frame_messages", read)
    requests: list[Submitted] = []
    for _ in range(4):
        # The frames of earlier responses come before those that this one needs.
        requests.append(await first.submit(prompts=2))
        for claim in await worker.claim(2):
            await worker.say(claim, "a", "b")
        await asyncio.sleep(0.01)
    await first.kill()

    attachments = await asyncio.gather(*(second.attach(each.id) for each in reversed(requests)))

    for attachment in attachments:
        reader = Reader(attachment.generation)
        await reader.until(lambda r: r.text_of(0) == r.text_of(1) == "ab")
    assert sum(len(call.args[0].deltas) for call in read.call_args_list) == 16


async def test_end_that_the_owner_did_not_write_is_delivered_and_settled(
    open_house: OpenHouse, worker: FakeWorker, redis: "Redis"
) -> None:
    first = await open_house("gw1", journal_seconds=LATE)
    second = await open_house("gw2")
    request = await first.submit()
    claim = await worker.claim_one()
    await first.kill()
    await worker.conclude(claim, "a", "b")

    reader = await Reader((await second.attach(request.id)).generation).to_the_end()

    assert reader.text == "ab"
    assert await settled(redis, request.id) == [("finished", 3, 2)]
    await state_is(second, request.id, RequestState.FINISHED)


async def test_line_of_a_batch_ends_when_its_settlement_is_confirmed(
    open_house: OpenHouse, worker: FakeWorker, redis: "Redis", monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = await open_house("gw1", journal_seconds=LATE), await open_house("gw2")
    request = await first.submit(line="batch_1:1")
    reader = Reader(request.generation)
    end, is_journal_complete = QuotaStore.end, list[bool]()

    async def fail(self: QuotaStore, ending: RequestEnd) -> bool:
        if ending.record is not None and ending.record.gateway == "gw1":
            # Otherwise the next gateway would run the line again, and charge it twice.
            is_journal_complete.append((await first.find(request.id)).has_begun)
            raise RedisConnectionError
        return await end(self, ending)

    monkeypatch.setattr(QuotaStore, "end", fail)
    await worker.conclude(await worker.claim_one(), "a", "b")
    await reader.to_the_end()
    finishing = asyncio.create_task(first.responses.of(request.settlement).finish())
    attachment = await second.attach(request.id)
    assert (await Reader(attachment.generation).to_the_end()).text == "ab"
    waiting = asyncio.create_task(second.responses.settled(await second.find(request.id)))
    await asyncio.sleep(0.5)
    assert set(is_journal_complete) == {True}
    assert not finishing.done()
    assert not waiting.done()
    assert (await second.find(request.id)).state is RequestState.RUNNING
    await first.kill()
    await end_task(finishing)
    # Since no gateway renews it, the sweep pauses the request without a record.
    await paused_by_the_sweep(redis, request.id)
    await waiting
    assert await settled(redis, request.id) == [("finished", 3, 2)]
    await state_is(second, request.id, RequestState.FINISHED)
    stored = await second.find(request.id)
    await second.responses.forget(stored.head)
    with pytest.raises(StoreUnavailableError):
        await second.responses.settled(stored)


async def paused_by_the_sweep(redis: "Redis", request_id: str) -> None:
    """End a request whose gateway is dead as the sweep ends a line: it holds and costs nothing."""
    lease = not_none(await redis.zscore(keys.open_requests(keys.bucket_of(TENANT)), request_id))
    paused = RequestEnd(
        tenant_id=TENANT,
        request_id=request_id,
        state=RequestState.PAUSED,
        expired_ms=int(lease),
    )
    assert await QuotaStore(MeasuredConnection(redis)).end(paused)


async def test_line_that_is_reserved_again_keeps_its_id_and_time(
    first: House, second: House, worker: FakeWorker, redis: "Redis"
) -> None:
    request, _ = await begun(first, worker, line="batch_1:1")
    await first.kill()
    await paused_by_the_sweep(redis, request.id)
    attachment = await second.attach(request.id)
    await worker.conclude(await worker.claim_one(), "b")
    await Reader(attachment.generation).to_the_end()

    # Otherwise a settlement by a third gateway is another row in the ledger.
    record = (await settled_records(redis, 1))[request.id]
    assert record.created_ms == request.settlement.record.created_ms


async def test_concurrent_readers_take_a_response_over_once(
    open_house: OpenHouse, worker: FakeWorker, redis: "Redis"
) -> None:
    first = await open_house("gw1")
    others = [await open_house(f"gw{number}") for number in (2, 3, 4)]
    request, _ = await begun(first, worker)
    await first.kill()

    attachments = await asyncio.gather(*(house.attach(request.id) for house in others))
    readers = [Reader(each.generation) for each in attachments]
    again = await worker.claim_one()
    await worker.conclude(again, "b")

    for reader in readers:
        await reader.to_the_end()
        assert reader.text == "ab"
    assert await settled(redis, request.id) == [("finished", 3, 2)]
    assert (await others[0].find(request.id)).status.term == 2


async def test_response_can_be_taken_over_repeatedly(
    open_house: OpenHouse, worker: FakeWorker, redis: "Redis"
) -> None:
    houses = [await open_house(f"gw{number}") for number in range(1, 5)]
    request = await houses[0].submit(prompts=2)
    claims = await worker.claim(2)
    for claim in claims:
        await worker.say(claim, "a")
    await Reader(request.generation).until(lambda r: r.text_of(0) and r.text_of(1))
    expected = "a"
    for number, house in enumerate(houses[1:], start=2):
        await houses[number - 2].kill()
        attachment = await house.attach(request.id)
        reader = Reader(attachment.generation)
        claims = await worker.claim(2)
        for claim in claims:
            await worker.say(claim, str(number))
        expected += str(number)
        await reader.until(
            lambda r, e=expected: r.text_of(0) == e and r.text_of(1) == e  # type: ignore[misc]
        )
    for claim in claims:
        await worker.conclude(claim, ".")
    await reader.to_the_end(2)
    assert reader.text_of(1) == "a234."
    assert await settled(redis, request.id) == [("finished", 6, 10)]


async def test_slow_former_owner_settles_nothing_and_stops(
    first: House, second: House, worker: FakeWorker, redis: "Redis"
) -> None:
    request = await first.submit()
    direct = Reader(request.generation)
    claim = await worker.claim_one()
    await worker.say(claim, "a")
    await direct.until_text("a")
    await redis.delete(keys.gateway_alive("gw1"))

    attachment = await second.attach(request.id)
    reader = Reader(attachment.generation)
    await worker.say(claim, "lost")
    again = await worker.claim_one()
    await direct.to_the_end()
    assert direct.failure is not None
    assert direct.failure.code is FailureCode.TAKEN_OVER
    first.responses.of(request.settlement).leave()
    await worker.conclude(again, "b")
    await reader.to_the_end()

    assert reader.text == "ab"
    assert await settled(redis, request.id) == [("finished", 3, 2)]
    assert not first.responses._owned.by_id
    assert first.dispatcher.jobs_in_flight == 0
    assert first.reservations.open_requests == 0


async def test_unaware_former_owner_neither_settles_nor_cancels(
    open_house: OpenHouse, worker: FakeWorker, redis: "Redis", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lost_jobs, "SILENCE_SECONDS", LATE)
    first = await open_house("gw1", journal_seconds=LATE)
    second = await open_house("gw2")
    request, claim = await begun(first, worker)
    direct = Reader(request.generation)
    await redis.delete(keys.gateway_alive("gw1"))
    reader = Reader((await second.attach(request.id)).generation)
    await worker.say(claim, "late")
    again = await worker.claim_one()
    await direct.to_the_end()
    assert not direct.text
    assert direct.failure is not None
    assert direct.failure.code is FailureCode.TAKEN_OVER

    first.responses.of(request.settlement).leave()
    await eventually(lambda: not first.responses._owned.by_id, what="the old owner's noticing")
    await first.settlements.aclose()

    assert not await usage_records(redis)
    assert not await redis.llen(keys.control("m", worker.name))
    await worker.conclude(again, "b")
    await reader.to_the_end()
    assert await settled(redis, request.id) == [("finished", 3, 2)]


async def taken_over(first: House, second: House, worker: FakeWorker) -> OwnedResponse:
    """Start a response at a gateway that dies; return it as the other one owns it, unread."""
    request = await first.submit()
    await worker.claim_one()
    await first.kill()
    page = await second.responses.store.status(TENANT, request.id)
    assert page is not None
    assert await second.responses._takeovers.keep_running(TENANT, request.id, page) == "gw2"
    return second.responses._owned.by_id[request.id]


async def test_response_just_taken_over_waits_for_its_reader(
    first: House, second: House, worker: FakeWorker
) -> None:
    taken = await taken_over(first, second, worker)
    taken.end_if_abandoned()

    assert not taken.settlement.has_ended


# -- abandoned responses --------------------------------------------------------------------------


async def left(first: House, worker: FakeWorker, redis: "Redis", **parameters: Any) -> Submitted:
    """Start a response, and abandon it after two tokens."""
    request, claim = await begun(first, worker, "a", "b", **parameters)
    first.responses.of(request.settlement).leave()
    control = keys.control("m", worker.name)
    await eventually(lambda: redis.llen(control), what="the cancellation being sent")
    # The engine had sampled one more token when it received the cancellation.
    await worker.drop(claim, tokens=3)
    await state_is(first, request.id, RequestState.PAUSED)
    return request


@pytest.mark.parametrize("at", ["gw1", "gw2"])
async def test_abandoned_response_resumes_and_charges_every_token_once(
    first: House, second: House, worker: FakeWorker, redis: "Redis", at: str
) -> None:
    request = await left(first, worker, redis)
    assert await settled(redis, request.id) == [("cancelled", 3, 3)]

    house = first if at == "gw1" else second
    attachment = await house.attach(request.id)
    reader = await Reader(attachment.generation).until_text("ab")
    claim = await worker.claim_one()
    assert claim.job.resumption is not None
    assert claim.job.resumption.sequences[0].token_ids == [100, 101]
    await worker.conclude(claim, "c", "d")
    await reader.to_the_end()

    assert reader.text == "abcd"
    assert await settled(redis, request.id, f"{request.id}.2") == [
        ("cancelled", 3, 3),
        # The engine has read the prompt again.
        ("finished", 3, 1),
    ]
    earlier, later = (await usage_records(redis)).values()
    assert earlier.created_ms < later.created_ms, "limits of a day count it when it resumed"
    await attachment.aclose()


async def test_line_that_was_left_is_charged_as_a_whole_when_it_resumes(
    first: House, second: House, worker: FakeWorker, redis: "Redis"
) -> None:
    request = await left(first, worker, redis, line="batch_1:1")

    reader = Reader((await second.attach(request.id)).generation)
    await worker.conclude(await worker.claim_one(), "c", "d")
    await reader.to_the_end()

    # What was used before has no record.
    assert await settled(redis, request.id) == [("finished", 3, 4)]


async def test_response_whose_followers_died_resumes_without_a_second_prompt(
    first: House, second: House, worker: FakeWorker, redis: "Redis"
) -> None:
    request, claim = await begun(first, worker, "a", "b")
    await worker.send("gw1", started=[JobStarted(claim.job.handle, 1, 3, 1, "class")])
    attachment = await second.attach(request.id)
    await Reader(attachment.generation).until_text("ab")
    response = first.responses._owned.by_id[request.id]
    await eventually(lambda: response._followers, what="Follow")
    response.leave()
    await second.kill()
    response._followers = dict.fromkeys(response._followers, 0.0)
    control = keys.control("m", worker.name)
    await eventually(lambda: redis.llen(control), what="the cancellation being sent")
    await worker.drop(claim, tokens=2, cached=1)
    await state_is(first, request.id, RequestState.PAUSED)

    again = await first.attach(request.id)
    reader = await Reader(again.generation).until_text("ab")
    claim = await worker.claim_one()
    resumption = claim.job.resumption
    assert resumption is not None
    assert (resumption.prompt_tokens, resumption.cached_tokens) == (3, 1)
    await worker.say(claim, "c", finish=FinishReason.STOP)
    # This engine has all of the prompt in its cache.
    await worker.finish(claim, cached=3)
    await reader.to_the_end()

    assert await settled(redis, request.id, f"{request.id}.2") == [
        ("cancelled", 3, 2),
        ("finished", 0, 1),
    ]
    records = (await usage_records(redis)).values()
    assert {each.cached_tokens for each in records} == {0, 1}
    await again.aclose()


async def test_silence_of_followers_ends_no_response_while_redis_is_unsteady(
    first: House, second: House, worker: FakeWorker
) -> None:
    taken = await taken_over(first, second, worker)
    others, presence = second.responses._owned, second.dispatcher.presence
    presence._resume_after_seconds = 60.0
    presence.note_outage()
    taken._wanted_until = 0.0

    await others.check()
    assert not taken.settlement.has_ended
    presence._resume_after_seconds = 0.0
    await others.check()
    assert taken.settlement.has_ended


async def test_abandoned_response_refused_by_limits_can_resume_later(
    first: House, second: House, worker: FakeWorker, redis: "Redis"
) -> None:
    limits = Limits(concurrent_requests=1)
    request = await left(first, worker, redis, limits=limits)
    other = await first.submit(limits=limits)
    with pytest.raises(RateLimitError):
        await second.attach(request.id)
    await state_is(second, request.id, RequestState.PAUSED)
    first.responses.of(other.settlement).leave()

    async def has_resumed() -> bool:
        try:
            await second.attach(request.id)
        except RateLimitError:
            return False
        return True

    await eventually(has_resumed, what="the response continuing")
    claim = await worker.claim_one()
    assert claim.job.id == f"{request.id}-0"


async def test_resumed_response_reserves_its_image_tokens_again(
    first: House, second: House, worker: FakeWorker, redis: "Redis"
) -> None:
    # Enough for the request, but not for what it has used and the prompt again.
    limits = Limits(tokens_per_minute=len(PROMPT) + 100 + 16)
    request = await left(first, worker, redis, limits=limits, image_tokens=100)
    with pytest.raises(RateLimitError):
        await second.attach(request.id)


async def test_response_abandoned_before_tokens_is_charged_its_prompt_when_it_resumes(
    first: House, second: House, worker: FakeWorker, redis: "Redis"
) -> None:
    request = await first.submit()
    first.responses.of(request.settlement).leave()
    await state_is(second, request.id, RequestState.PAUSED)
    assert await settled(redis, request.id) == [("cancelled", 0, 0)]

    reader = Reader((await second.attach(request.id)).generation)
    claim = await worker.claim_one()
    assert claim.job.resumption is None
    await worker.conclude(claim, "a")
    await reader.to_the_end()

    assert (await settled(redis, request.id, f"{request.id}.2"))[1] == ("finished", 3, 1)


async def test_reader_that_attaches_during_abandonment_is_served(
    first: House, second: House, worker: FakeWorker, redis: "Redis"
) -> None:
    request, claim = await begun(first, worker)
    first.responses.of(request.settlement).leave()

    reader = Reader((await second.attach(request.id)).generation)
    control = keys.control("m", worker.name)
    await eventually(lambda: redis.llen(control), what="the cancellation being sent")
    await worker.drop(claim, tokens=1)
    again = await worker.claim_one()
    await worker.conclude(again, "b")

    await reader.to_the_end()
    assert reader.text == "ab"


# -- background ---------------------------------------------------------------------------------


async def test_response_that_an_outage_has_paused_is_charged_for_what_is_delivered_later(
    first: House, second: House, worker: FakeWorker, redis: "Redis"
) -> None:
    request, claim = await begun(first, worker, "a")
    first.responses.of(request.settlement).fail(queue_unavailable())
    # Two of these tokens were not received: they are free until the engine makes them again.
    await worker.drop(claim, tokens=3)
    await state_is(first, request.id, RequestState.PAUSED)
    reader = Reader((await second.attach(request.id)).generation)
    await worker.conclude(await worker.claim_one(), "b", "c", "d")
    assert (await reader.to_the_end()).text == "abcd"
    records = await settled_records(redis, 2)
    paid = Counts.total([each.paid for each in records.values()])
    assert (paid.prompt_tokens, paid.completion_tokens) == (3, 4)


async def left_to_itself(house: House, worker: FakeWorker) -> tuple[Submitted, JobClaim]:
    """Start a response, abandon it, and kill its gateway when Redis has the text `a`."""
    request = await house.submit(is_background=True)
    house.responses.of(request.settlement).leave()
    claim = await worker.claim_one()
    await worker.say(claim, "a")
    await eventually(lambda: house.responses._owned.by_id[request.id]._written, what="journal")
    await house.kill()
    return request, claim


async def test_background_response_needs_no_reader(
    first: House, second: House, worker: FakeWorker, redis: "Redis"
) -> None:
    request = await first.submit(is_background=True)
    first.responses.of(request.settlement).leave()
    claim = await worker.claim_one()
    await worker.conclude(claim, "a")

    assert await settled(redis, request.id) == [("finished", 3, 1)]
    reader = await Reader((await second.attach(request.id)).generation).to_the_end()
    assert reader.text == "a"

    async def is_removed() -> bool:
        return not await redis.sismember(keys.background_responses("gw1"), request.id)

    # No gateway needs to take it over.
    await eventually(is_removed, what="the owner's removal of the response")


async def test_memory_of_a_response_needs_no_garbage_collector(
    first: House, worker: FakeWorker, redis: "Redis"
) -> None:
    gc.disable()
    try:
        request = await first.submit(is_background=True)
        first.responses.of(request.settlement).leave()
        await worker.conclude(await worker.claim_one(), "a")
        await settled(redis, request.id)
        left: list[weakref.ref[Any]] = [
            weakref.ref(request.generation),
            weakref.ref(request.settlement),
        ]
        del request
        await eventually(lambda: not any(each() for each in left), what="no cycle")
    finally:
        gc.enable()


async def test_background_response_of_a_dead_gateway_is_taken_over_on_its_notice(
    first: House, second: House, worker: FakeWorker, redis: "Redis"
) -> None:
    request, claim = await left_to_itself(first, worker)
    await worker.lose(claim, tokens=1)

    again = await worker.claim_one()
    await worker.conclude(again, "b")

    assert await settled(redis, request.id) == [("finished", 3, 2)]
    reader = await Reader((await second.attach(request.id)).generation).to_the_end()
    assert reader.text == "ab"


async def test_background_response_that_ended_after_its_gateway_died_is_settled(
    first: House, second: House, worker: FakeWorker, redis: "Redis"
) -> None:
    request = await first.submit(is_background=True)
    first.responses.of(request.settlement).leave()
    claim = await worker.claim_one()
    await eventually(lambda: redis.sismember(keys.BACKGROUND_OWNERS, "gw1"), what="the note")
    await first.kill()
    await worker.conclude(claim, "a")

    await second.responses.take_over_background()

    assert await settled(redis, request.id) == [("finished", 3, 1)]
    await state_is(second, request.id, RequestState.FINISHED)
    assert not await redis.exists(keys.background_responses("gw1"))
    assert not await redis.sismember(keys.BACKGROUND_OWNERS, "gw1")


async def test_background_request_without_a_queue_runs_for_the_client_that_repeated_it(
    first: House, second: House, worker: FakeWorker, redis: "Redis"
) -> None:
    request = await first.submit(is_background=True)
    claim = await worker.claim_one()
    # The first gateway does not know whether the queue has accepted the jobs.
    first.responses.of(request.settlement).fail(queue_unavailable())
    await worker.drop(claim, tokens=0)
    await eventually(lambda: not first.responses._owned.by_id, what="the settlement")

    # A client stops to look at a status that is an end.
    response, sealer = await second.find(request.id), Sealer(["secret"])
    stored = StoredCompletions(Mock(), Mock(), Mock(), second.responses, Mock(), sealer, Mock())
    shown = await stored.status(CHATS, response)
    assert msgspec.json.decode(shown.body)["status"] == "queued"

    await worker.conclude(await worker.claim_one(), "a")
    await state_is(second, request.id, RequestState.FINISHED)


@pytest.mark.slow
async def test_background_response_outlives_all_gateways(
    open_house: OpenHouse, worker: FakeWorker, redis: "Redis"
) -> None:
    first = await open_house("gw1")
    request, _ = await left_to_itself(first, worker)
    await redis.delete(keys.leases("m"), keys.job("m", f"{request.id}-0"))

    second = await open_house("gw2")
    assert (await second.find(request.id)).state is RequestState.RUNNING
    again = await worker.claim_one()
    await worker.conclude(again, "b")
    assert await settled(redis, request.id) == [("finished", 3, 2)]


async def test_stopping_gateway_hands_its_responses_over_and_settles_the_others(
    first: House, second: House, worker: FakeWorker, redis: "Redis"
) -> None:
    request = await first.submit(prompts=2, is_background=True)
    first.responses.of(request.settlement).leave()
    followed = await first.submit()
    cut = await first.submit(is_kept=False)
    *claims, ending = await worker.claim(4)
    for claim in claims:
        await worker.say(claim, "a")
    attachment = await second.attach(followed.id)
    reader = await Reader(attachment.generation).until_text("a")
    await eventually(lambda: first.responses._owned.by_id[followed.id]._followers, what="Follow")
    await eventually(
        lambda: first.responses._owned.by_id[request.id].generation.received_tokens[0], what="a"
    )
    first.responses.of(followed.settlement).leave()

    # The first of two jobs that fail hands the response over, which ends the other one.
    first.dispatcher.fail_all(FailureCode.GATEWAY_STOPPING)
    cut.settlement.end(Ending(Outcome.FAILED, "gateway_stopping"))
    leaving = asyncio.create_task(first.leave())
    await first.has_handed_over.wait()
    await worker.drop(ending, tokens=1)
    await leaving
    assert list(await usage_records(redis)) == [cut.id]
    for claim in claims:
        await worker.lose(claim, tokens=1)
    for claim in await worker.claim(3):
        await worker.conclude(claim, "b")

    await reader.to_the_end()
    assert reader.text == "ab"
    records = await settled_records(redis, 3)
    assert {id_: counts_of(record) for id_, record in records.items()} == {
        request.id: ("finished", 6, 4),
        followed.id: ("finished", 3, 2),
        cut.id: ("failed", 3, 1),
    }


# -- cancelling ---------------------------------------------------------------------------------


@pytest.mark.parametrize("at", ["gw1", "gw2"])
async def test_cancelled_response_ends_for_every_reader_and_cannot_resume(
    first: House, second: House, worker: FakeWorker, redis: "Redis", at: str
) -> None:
    request = await first.submit()
    claim = await worker.claim_one()
    await worker.say(claim, "a")
    attachment = await second.attach(request.id)
    reader = await Reader(attachment.generation).until_text("a")
    house = first if at == "gw1" else second

    answer = await house.responses.cancel(await house.find(request.id))
    assert answer.state is RequestState.CANCELLED
    await worker.drop(claim, tokens=2)

    for generation in (
        request.generation,
        attachment.generation,
        (await second.attach(request.id)).generation,
    ):
        reader = await Reader(generation).to_the_end()
        assert reader.failure is not None
        assert reader.failure.code is FailureCode.CANCELLED
    assert await settled(redis, request.id) == [("cancelled", 3, 2)]
    again = await second.responses.cancel(await second.find(request.id))
    assert again.state is RequestState.CANCELLED
    assert await nothing_left(redis, "m")


@pytest.mark.parametrize("at", ["gw1", "gw2"])
async def test_response_that_is_deleted_while_it_ends_is_charged_and_leaves_nothing(
    first: House, second: House, worker: FakeWorker, redis: "Redis", at: str
) -> None:
    request, claim = await begun(first, worker, is_background=True)
    house = first if at == "gw1" else second
    cancelled = await house.responses.cancel(await house.find(request.id))
    await house.responses.forget(cancelled.head)
    await worker.drop(claim, tokens=1)
    assert await settled(redis, request.id) == [("cancelled", 3, 1)]
    assert (
        not_none(await second.responses.store.status(TENANT, request.id)).state
        is RequestState.DELETED
    )
    await eventually(lambda: not first.responses._owned.by_id, what="the owner's noticing")
    assert not await redis.exists(keys.content(request.id), keys.journal(request.id))
    assert await counted_bytes(redis, TENANT, request.id) == 0


async def test_head_of_a_response_is_read_once_a_second_until_it_is_cancelled(
    first: House, second: House, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    request, _ = await begun(first, worker)
    response = await second.find(request.id)
    monkeypatch.setattr(service, "CANCEL_SECONDS", 0.1)
    first.dispatcher.notices.on_cancel = lambda _: None
    read = AsyncMock(wraps=second.responses.store.read)
    monkeypatch.setattr(second.responses.store, "read", read)
    assert (await second.responses.cancel(response)).state is RequestState.RUNNING
    assert read.await_count <= 3


async def test_response_of_a_dead_gateway_can_be_cancelled(
    first: House, second: House, worker: FakeWorker, redis: "Redis"
) -> None:
    request, claim = await begun(first, worker, is_background=True)
    await first.kill()

    answer = await second.responses.cancel(await second.find(request.id))

    assert answer.state is RequestState.CANCELLED
    await worker.drop(claim, tokens=1)
    assert await settled(redis, request.id) == [("cancelled", 3, 1)]


async def test_abandoned_response_can_be_cancelled_and_is_not_settled_again(
    first: House, second: House, worker: FakeWorker, redis: "Redis"
) -> None:
    request = await left(first, worker, redis)

    answer = await second.responses.cancel(await second.find(request.id))

    assert answer.state is RequestState.CANCELLED
    reader = await Reader((await second.attach(request.id)).generation).to_the_end()
    assert reader.text == "ab"
    assert reader.failure is not None
    assert reader.failure.code is FailureCode.CANCELLED
    assert await settled(redis, request.id) == [("cancelled", 3, 3)]


async def test_finished_response_cannot_be_cancelled(first: House, worker: FakeWorker) -> None:
    request = await first.submit()
    claim = await worker.claim_one()
    await worker.conclude(claim, "a")
    await Reader(request.generation).to_the_end()
    await first.responses.of(request.settlement).finish()
    await state_is(first, request.id, RequestState.FINISHED)

    answer = await first.responses.cancel(await first.find(request.id))

    assert answer.state is RequestState.FINISHED
