"""Lost data and outages of Redis, idle readers, and sweeps at the wrong moment."""

import asyncio
import math
from itertools import product
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from contract import keys
from contract.outcomes import FailureCode
from contract.queue import JobQueue
from gateway.billing.ledger.sweep import Sweep
from gateway.completions.queue.generation import REPLIES_AT_ONCE, Generation
from gateway.completions.stored import reader as reading
from gateway.completions.stored.owned import WRITE_SECONDS, OwnedState
from gateway.completions.stored.store import ResponseStore
from gateway.limits.replies import RequestEnd, RequestState
from gateway.limits.store import QuotaStore
from gateway.records.errors import SlowReaderError, StoreUnavailableError
from gateway.records.usage_record import UsageRecord, decode_usage
from tests.gateway.completions.stored.conftest import OpenHouse
from tests.gateway.completions.stored.house import (
    MODEL,
    TENANT,
    House,
    Reader,
    Submitted,
    begun,
    counts_of,
    settled,
    state_is,
    usage_records,
)
from tests.gateway.conftest import eventually
from tests.support.fake_worker import FakeWorker
from tests.support.redis_server import RedisServer

BUCKET = keys.bucket_of(TENANT)


async def test_response_that_redis_lost_is_restored(
    first: House, second: House, worker: FakeWorker, redis: "Redis"
) -> None:
    request, claim = await begun(first, worker, "a", "b", is_background=True)
    attachment = await second.attach(request.id)
    reader = await Reader(attachment.generation).until_text("ab")

    await redis.delete(keys.content(request.id), keys.journal(request.id))
    await worker.say(claim, "c")
    await reader.until_text("abc")

    again = await second.attach(request.id)
    await Reader(again.generation).until_text("abc")


@pytest.mark.parametrize("has_ended", [False, True], ids=["running", "ended"])
async def test_background_response_that_a_failover_lost_is_written_again(
    first: House,
    second: House,
    worker: FakeWorker,
    redis: "Redis",
    monkeypatch: pytest.MonkeyPatch,
    *,
    has_ended: bool,
) -> None:
    request, claim = await begun(first, worker, "a", is_background=True)
    first.responses.of(request.settlement).leave()
    if has_ended:
        await worker.conclude(claim, "b")
        await eventually(lambda: not first.responses._owned.by_id, what="the end")
    await first.responses._owned.write()

    await redis.delete(keys.content(request.id), keys.journal(request.id))
    presence = second.dispatcher.presence
    presence.note_outage()
    await second.responses.require_intact()
    presence._resume_after_seconds = 60.0
    with pytest.raises(StoreUnavailableError):
        await second.responses.require_intact()

    with monkeypatch.context() as patch:
        patch.setattr(ResponseStore, "append", fail)  # The new server is away again.
        first.dispatcher.presence.note_outage()
        await asyncio.sleep(WRITE_SECONDS)
    state = RequestState.FINISHED if has_ended else RequestState.RUNNING
    await eventually(lambda: _is_stored(redis, request.id), what="the response")
    await state_is(second, request.id, state)


async def _is_stored(redis: "Redis", request_id: str) -> bool:
    return bool(await redis.exists(keys.content(request_id)))


async def test_owned_response_never_returns_to_an_earlier_state(first: House) -> None:
    response = first.responses._owned.by_id[(await first.submit()).id]
    order = (OwnedState.RUNNING, OwnedState.STOPPING, OwnedState.ENDED, OwnedState.LOST)
    for (at, before), (to, after) in product(enumerate(order), repeat=2):
        response._state = before
        # A late notice or settlement, which may come in any state.
        response._enter(after)
        assert response._state is (after if to > at else before)


@pytest.mark.parametrize("is_findable", [True, False], ids=["with-a-key", "without"])
async def test_background_response_that_is_not_stored_runs_only_if_its_client_can_find_it(
    first: House, redis: "Redis", monkeypatch: pytest.MonkeyPatch, is_findable: bool
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(ResponseStore, "open", fail)
        request = await first.submit(is_background=True)
        with pytest.raises(StoreUnavailableError):
            await first.responses.require_stored(request.id, is_findable=is_findable)
    await first.responses.require_stored(request.id, is_findable=is_findable)
    await state_is(
        first, request.id, RequestState.RUNNING if is_findable else RequestState.CANCELLED
    )
    if not is_findable:
        assert await settled(redis, request.id) == [("cancelled", 0, 0)]


@pytest.mark.parametrize("lost", ["content", "record", "end"])
async def test_reader_of_a_lost_response_gets_an_error(
    first: House,
    second: House,
    worker: FakeWorker,
    redis: "Redis",
    monkeypatch: pytest.MonkeyPatch,
    lost: str,
) -> None:
    monkeypatch.setattr(reading, "MISSING_SECONDS", 0.3)
    request, claim = await begun(first, worker, is_background=True)
    if lost == "end":
        first.responses.of(request.settlement).leave()
        await worker.conclude(claim, "b")
        await eventually(lambda: not first.responses._owned.by_id, what="the end")
        await redis.rpop(keys.journal(request.id))
    attachment = await second.attach(request.id)
    await first.kill()
    if lost == "content":
        await redis.delete(keys.content(request.id), keys.journal(request.id))
    elif lost == "record":
        await redis.delete(keys.request(BUCKET, request.id))

    failure = (await Reader(attachment.generation).to_the_end()).failure
    assert failure is not None
    assert failure.code is FailureCode.OUTPUT_LOST


async def test_live_owner_writes_a_response_without_a_record(
    first: House, second: House, worker: FakeWorker, redis: "Redis", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "MISSING_SECONDS", 0.1)
    monkeypatch.setattr(reading, "REPEAT_SECONDS", 0.1)
    request, claim = await begun(first, worker)
    readers = [Reader((await house.attach(request.id)).generation) for house in (first, second)]
    await redis.delete(keys.request(BUCKET, request.id))
    await asyncio.sleep(0.6)

    await worker.conclude(claim, "b")
    for reader in readers:
        assert (await reader.to_the_end()).text == "ab"


async def test_response_continues_after_a_redis_outage(
    first: House,
    second: House,
    worker: FakeWorker,
    redis_server: RedisServer,
    redis: "Redis",
) -> None:
    request = await first.submit(is_background=True)
    direct = Reader(request.generation)
    claim = await worker.claim_one()
    await worker.say(claim, "a")
    attachment = await second.attach(request.id)
    reader = Reader(attachment.generation)
    await reader.until_text("a")
    await direct.until_text("a")

    redis_server.stop()
    await asyncio.sleep(1.0)
    redis_server.start()
    await worker.announce()
    again = await worker.claim_one()
    assert again.job.resumption is not None
    await worker.conclude(again, "b")

    await direct.to_the_end()
    await first.responses.of(request.settlement).finish()
    await reader.to_the_end()
    assert (direct.text, reader.text) == ("ab", "ab")
    await state_is(second, request.id, RequestState.FINISHED)


async def test_owner_whose_heartbeat_a_failover_lost_is_not_taken_for_dead(
    first: House, second: House, worker: FakeWorker, redis: "Redis"
) -> None:
    request, _ = await begun(first, worker, is_background=True)
    presence = second.dispatcher.presence
    presence._resume_after_seconds, presence._began_at = 60.0, -math.inf
    presence._processes._known = {"the former master"}
    await redis.delete(keys.gateway_alive("gw1"))

    await second.responses.take_over_background()
    assert (await second.find(request.id)).status.owner == "gw1"

    presence._steady_since = -math.inf
    await second.responses.take_over_background()
    assert (await second.find(request.id)).status.owner == "gw2"


async def test_background_response_continues_without_its_slow_reader(
    first: House, worker: FakeWorker, redis: "Redis"
) -> None:
    request, claim = await begun(first, worker, is_background=True)
    first.responses.of(request.settlement).fail(SlowReaderError("slow"))
    control = keys.control(MODEL, worker.name)
    await eventually(lambda: redis.llen(control), what="the cancellation being sent")
    await worker.drop(claim, tokens=1)

    again = await worker.claim_one()
    await worker.conclude(again, "b")

    assert await settled(redis, request.id, f"{request.id}.2") == [
        ("cancelled", 3, 1),
        ("finished", 3, 1),
    ]


async def test_idle_reader_keeps_the_response_and_uses_no_memory(
    first: House, second: House, worker: FakeWorker, redis: "Redis"
) -> None:
    request = await first.submit(max_tokens=10_000)
    claim = await worker.claim_one()
    for _ in range(20):
        deltas = [worker.next_delta(claim, "x") for _ in range(100)]
        await worker.send("gw1", deltas=deltas)
    direct = Reader(request.generation)
    await direct.until(lambda r: len(r.text) == 2000)
    attachment = await second.attach(request.id)
    generation: Generation = attachment.generation
    await eventually(lambda: generation._replies, what="the first replies")
    await eventually(lambda: first.responses._owned.by_id[request.id]._followers, what="Follow")
    first.responses.of(request.settlement).leave()
    await asyncio.sleep(1.0)

    assert not request.settlement.has_ended
    assert len(generation._replies) <= REPLIES_AT_ONCE
    reader = await Reader(generation).until(lambda r: len(r.text) == 2000)
    await worker.finish(claim)
    await reader.to_the_end()
    assert not generation.overflowed


# -- the sweep ----------------------------------------------------------------------------------


async def expire(redis: "Redis", request_id: str) -> None:
    """Expire the lease of a reservation."""
    await redis.zadd(keys.open_requests(BUCKET), {request_id: 1000})


async def abandoned(house: House, worker: FakeWorker, redis: "Redis") -> Submitted:
    """Start a response whose gateway and worker die, and let its reservation expire."""
    request, claim = await begun(house, worker)
    await house.kill()
    await worker.lose(claim, tokens=1)
    await expire(redis, request.id)
    return request


async def test_sweep_does_not_settle_a_response_that_another_gateway_continues(
    first: House, second: House, worker: FakeWorker, redis: "Redis", monkeypatch: pytest.MonkeyPatch
) -> None:
    request = await abandoned(first, worker, redis)
    taken: list[Reader] = []
    end = QuotaStore.end

    async def taken_over_first(store: QuotaStore, ending: RequestEnd) -> bool:
        """Let the sweep settle after another gateway has taken the response over."""
        if ending.expired_ms is not None:
            taken.append(Reader((await second.attach(request.id)).generation))
        return await end(store, ending)

    monkeypatch.setattr(QuotaStore, "end", taken_over_first)
    assert await Sweep(redis).run() == 0
    (reader,) = taken
    again = await worker.claim_one()
    await worker.conclude(again, "b")
    await reader.to_the_end()

    assert reader.text == "ab"
    assert await settled(redis, request.id) == [("finished", 3, 2)]


@pytest.mark.parametrize("is_kept", [True, False], ids=["receipt", "no receipt"])
async def test_response_settled_by_the_sweep_resumes_with_a_new_reservation(
    open_house: OpenHouse, worker: FakeWorker, redis: "Redis", *, is_kept: bool
) -> None:
    first, second, third = [await open_house(f"gw{number}") for number in (1, 2, 3)]
    request = await abandoned(first, worker, redis)
    if not is_kept:
        await redis.delete(keys.job(MODEL, f"{request.id}-0"))
    assert await Sweep(redis).run() == 1

    reader = Reader((await second.attach(request.id)).generation)
    again = await worker.claim_one()
    await worker.say(again, "b")
    await reader.until_text("ab")
    assert await redis.zrange(keys.open_requests(BUCKET), 0, -1) == [request.id.encode()]

    await second.kill()
    await worker.lose(again, tokens=2)
    await eventually(lambda: _has_ended(redis, f"{request.id}-0"), what="the job being taken back")
    await expire(redis, request.id)
    assert await Sweep(redis).run() == 1
    reader = Reader((await third.attach(request.id)).generation)
    await worker.conclude(await worker.claim_one(), "c")
    await reader.to_the_end()

    assert reader.text == "abc"
    # Each has what the earlier ones have not.
    assert await settlements(redis, 3) == [
        (request.id, ("lost", 3, 1) if is_kept else ("lost", 0, 0)),
        (f"{request.id}.2", ("lost", 0, 1) if is_kept else ("lost", 3, 2)),
        (f"{request.id}.3", ("finished", 0, 1)),
    ]
    assert await redis.zrange(keys.open_requests(BUCKET), 0, -1) == []


async def test_reader_of_a_settled_response_waits_for_the_end_that_redis_lacks(
    first: House, second: House, worker: FakeWorker, redis: "Redis", monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its owner settles it while the server with its journal does not respond."""
    request, claim = await begun(first, worker)
    await stores_the_first_token(second, request.id)
    with monkeypatch.context() as patch:
        patch.setattr(ResponseStore, "append", fail)
        await worker.conclude(claim, "b")
        await Reader(request.generation).to_the_end()
        await first.responses.of(request.settlement).finish()
        await state_is(second, request.id, RequestState.FINISHED)
        reader = Reader((await second.attach(request.id)).generation)
        await reader.until_text("a")
    await redis.delete(keys.replies("gw1"), keys.gateway_alive("gw1"))

    assert (await reader.to_the_end()).text == "ab"
    assert await settled(redis, request.id) == [("finished", 3, 2)]


async def test_background_response_is_settled_only_with_its_whole_journal(
    first: House, second: House, worker: FakeWorker, redis: "Redis", monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its gateway dies while the server with its journal does not respond."""
    request, claim = await begun(first, worker, is_background=True)
    await stores_the_first_token(second, request.id)
    with monkeypatch.context() as patch:
        patch.setattr(ResponseStore, "append", fail)
        first.responses.of(request.settlement).leave()
        await worker.conclude(claim, "b")
        await eventually(lambda: bool(request.generation.finished), what="the last reply")
        await asyncio.sleep(2 * WRITE_SECONDS)
        await state_is(second, request.id, RequestState.RUNNING)
        await first.kill()
    reader = await Reader((await second.attach(request.id)).generation).to_the_end()

    assert reader.text == "ab"
    await state_is(second, request.id, RequestState.FINISHED)
    assert await settled(redis, request.id) == [("finished", 3, 2)]


async def stores_the_first_token(other: House, request_id: str) -> None:
    """Wait until another gateway finds the first token in the journal."""

    async def has_begun() -> bool:
        return (await other.find(request_id)).has_begun

    await eventually(has_begun, what="the first token in the journal")


async def fail(*_: Any, **__: Any) -> None:
    """Take the place of a command whose server does not respond."""
    raise RedisConnectionError


async def test_prompt_of_a_lost_request_that_received_nothing_is_paid_once(
    first: House, second: House, worker: FakeWorker, redis: "Redis"
) -> None:
    """The engine has read it twice: the first time is free."""
    request = await first.submit()
    claim = await worker.claim_one()
    await first.kill()
    await worker.drop(claim)
    await expire(redis, request.id)
    assert await Sweep(redis).run() == 1

    reader = Reader((await second.attach(request.id)).generation)
    await worker.conclude(await worker.claim_one(), "a")
    await reader.to_the_end()

    await settlements(redis, 2)
    records = await all_records(redis)
    paid = [each.prompt_tokens - each.free_prompt_tokens for each in records]
    assert [counts_of(each) for each in records] == [
        ("lost", 3, 0),
        ("finished", 3, 1),
    ]
    assert paid == [0, 3]


async def test_response_whose_receipt_was_lost_is_charged_although_the_sweep_was_first(
    open_house: OpenHouse, worker: FakeWorker, redis: "Redis"
) -> None:
    first, second = await open_house("gw1"), await open_house("gw2")
    request, claim = await begun(first, worker)
    await first.kill()
    await worker.conclude(claim, "b")
    await redis.delete(keys.job(MODEL, f"{request.id}-0"))
    await expire(redis, request.id)
    assert await Sweep(redis).run() == 1

    reader = await Reader((await second.attach(request.id)).generation).to_the_end()

    assert reader.text == "ab"
    await state_is(second, request.id, RequestState.FINISHED)
    assert await settlements(redis, 2) == [
        (request.id, ("lost", 0, 0)),
        (f"{request.id}.2", ("finished", 3, 2)),
    ]


async def test_whole_response_that_is_read_after_its_gateway_died_is_charged(
    first: House, second: House, worker: FakeWorker, redis: "Redis", monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its gateway dies after all tokens are stored, before Redis confirms the settlement."""
    end = QuotaStore.end

    async def fail(self: QuotaStore, ending: RequestEnd) -> bool:
        if ending.state is RequestState.FINISHED and ending.record.gateway == "gw1":  # type: ignore[union-attr]
            raise RedisConnectionError
        return await end(self, ending)

    monkeypatch.setattr(QuotaStore, "end", fail)
    request = await first.submit(stream=False)
    await worker.conclude(await worker.claim_one(), "a", "b")
    await Reader(request.generation).to_the_end()
    await first.responses.of(request.settlement).finish()
    await first.responses._owned.write()
    await first.kill()
    await expire(redis, request.id)
    assert await Sweep(redis).run() == 1
    (lost,) = await all_records(redis)

    reader = await Reader((await second.attach(request.id)).generation).to_the_end()

    assert reader.text == "ab"
    await state_is(second, request.id, RequestState.FINISHED)
    assert await settlements(redis, 2) == [
        (request.id, ("lost", 3, 2)),
        (f"{request.id}.2", ("finished", 3, 2)),
    ]
    _, delivered = await all_records(redis)
    assert (lost.cost_micros, delivered.cost_micros) == (0, 5)


async def settlements(redis: "Redis", number: int) -> list[tuple[str, tuple[str, int, int]]]:
    """Wait for a number of settlements; return their ids, outcomes and counts. Of those of one
    request, the ledger has the first, and what a later one has more.
    """

    async def are_made() -> bool:
        return len(await all_records(redis)) >= number

    await eventually(are_made, what="the settlements")
    return [(each.request_id, counts_of(each)) for each in await all_records(redis)]


async def all_records(redis: "Redis") -> list[UsageRecord]:
    """Return the records of all settlements, in order."""
    entries: Any = await redis.xrange(keys.usage(BUCKET))
    return [decode_usage(fields[b"u"]) for _, fields in entries]


async def test_sweep_settles_only_the_unsettled_part_of_a_resumed_response(
    open_house: OpenHouse, worker: FakeWorker, redis: "Redis"
) -> None:
    first, second = await open_house("gw1"), await open_house("gw2")
    request = await first.submit()
    first.responses.of(request.settlement).leave()
    await state_is(first, request.id, RequestState.PAUSED)
    reader = Reader((await second.attach(request.id)).generation)
    claim = await worker.claim_one()
    await worker.say(claim, "a", "b")
    await reader.until_text("ab")
    await second.kill()
    await worker.lose(claim, tokens=2)
    await eventually(lambda: _has_ended(redis, f"{request.id}-0"), what="the job being taken back")
    await expire(redis, request.id)

    assert await Sweep(redis).run() == 1

    records = {id_: counts_of(record) for id_, record in (await usage_records(redis)).items()}
    assert records == {
        request.id: ("cancelled", 0, 0),
        f"{request.id}.2": ("lost", 3, 2),
    }


async def _has_ended(redis: "Redis", job_id: str) -> bool:
    (receipt,) = await JobQueue(redis, MODEL).receipts([job_id])
    return receipt.state.name == "ENDED"
