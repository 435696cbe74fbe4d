"""Reservations of gateways: races, lost replies, outages of Redis and ledger, closing."""

import asyncio
import random
import time
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import msgspec
import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from common.tasks import end_task
from contract import keys
from gateway.limits import reservations
from gateway.limits import reservations as endings
from gateway.limits import store as store_module
from gateway.limits.replies import Kept, RequestState, ReservationRequest, sees_all
from gateway.limits.reservations import Admission, Reservations
from gateway.limits.seeding import Seeder
from gateway.limits.store import QuotaStore
from gateway.platform.redis_client import MeasuredConnection
from gateway.records.errors import InsufficientQuotaError, RateLimitError, StoreUnavailableError
from gateway.records.limits import LimitScope, SubjectLimits
from gateway.records.usage_record import Outcome
from tests.gateway.limits.building import (
    BUCKET,
    TENANT,
    Desk,
    TestClock,
    bucket_keys,
    key_of,
    open_ids,
    project_of,
    record,
    release_of,
    settlement,
    subject,
    tenant_of,
    usage,
)
from tests.gateway.limits.fake_ledger import FakeLedger
from tests.support.patience import PATIENCE_SECONDS


class Line:
    """The connection to Redis, which a test can cut before or after a command arrives."""

    def __init__(self, redis: "Redis") -> None:
        self._executor = MeasuredConnection(redis)
        self.is_cut = False
        self.loses_answers = False
        self.may_go_on = asyncio.Event()
        self.may_go_on.set()
        self.sent: list[tuple[Any, ...]] = []

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        self.sent.append(args)
        await self.may_go_on.wait()
        if self.is_cut:
            raise RedisConnectionError("cut")
        reply = await self._executor.execute_command(*args, **options)
        if self.loses_answers:
            raise RedisConnectionError("cut")
        return reply

    async def aclose(self) -> None:
        await self._executor.aclose()


@pytest.fixture
async def line(any_redis: "Redis") -> AsyncIterator[Line]:
    line = Line(any_redis)
    yield line
    await line.aclose()


@pytest.fixture
def ledger() -> FakeLedger:
    return FakeLedger()


@pytest.fixture
async def desk(line: Line, ledger: FakeLedger) -> AsyncIterator["GatewayDesk"]:
    """One gateway whose loops run."""
    one = GatewayDesk(line, ledger)
    task = asyncio.create_task(one.reservations.run())
    yield one
    await end_task(task)
    await one.reservations.aclose(seconds=0.2)


class GatewayDesk:
    """The reservations of one gateway, and short ways to use them."""

    def __init__(self, line: Line, ledger: FakeLedger, *subjects: SubjectLimits) -> None:
        self.line = line
        self.store = QuotaStore(line)
        self.reservations = Reservations(self.store, Seeder(self.store, ledger), "g1")
        given = {one.scope: one for one in subjects}
        self.subjects = tuple(given.get(s.scope, s) for s in (key_of(), project_of(), tenant_of()))

    def request(
        self, request_id: str, *, prepaid: bool = False, **amounts: Any
    ) -> ReservationRequest:
        return Desk(self.store, self.subjects, prepaid).request(request_id, **amounts)

    async def reserve(
        self, request_id: str, *, is_openai: bool = False, **amounts: Any
    ) -> Admission:
        request = self.request(request_id, **amounts)
        return await self.reservations.reserve(request, is_openai=is_openai)


async def until(condition: Any, *, seconds: float = PATIENCE_SECONDS) -> None:
    """Wait until a condition holds."""
    async with asyncio.timeout(seconds):
        while not await condition():
            await asyncio.sleep(0.01)


# -- exactly what the limits allow ---------------------------------------------------------------


@pytest.mark.parametrize("tokens_each", [30, 500])
async def test_race_of_two_gateways_on_one_key_admits_exactly_what_fits(
    any_redis: "Redis", ledger: FakeLedger, tokens_each: int
) -> None:
    """50 requests and 20,000 tokens a minute: with 30 tokens each fifty fit, with 500 forty."""
    key = key_of(requests_per_minute=50, tokens_per_minute=20_000)
    gateways = [GatewayDesk(Line(any_redis), ledger, key) for _ in range(2)]

    async def client(number: int) -> Admission | None:
        try:
            return await gateways[number % 2].reserve(
                f"r{number}", prompt=tokens_each // 2, completion=tokens_each // 2
            )
        except RateLimitError:
            return None

    answers = await asyncio.gather(*(client(number) for number in range(200)))
    admitted = [answer for answer in answers if answer is not None]
    assert len(admitted) == min(50, 20_000 // tokens_each)
    remaining = sorted(int(a.headers["x-ratelimit-remaining-requests"]) for a in admitted)
    assert remaining == list(range(50 - len(admitted), 50))
    (status,) = await gateways[0].store.status(TENANT, [key])
    assert status.requests_of_minute == len(admitted)


async def test_budget_and_credit_are_never_overspent_by_one_micro_dollar(
    any_redis: "Redis", ledger: FakeLedger
) -> None:
    """Settled and reserved amounts together never exceed the limit at any moment."""
    budget, ledger.granted = 20_000, 17_777
    gateways = [
        GatewayDesk(Line(any_redis), ledger, key_of(), tenant_of(budget_micros=budget))
        for _ in range(2)
    ]
    rng = random.Random(3)
    spent, open_cost, most = 0, 0, 0
    codes: set[str] = set()

    async def client(number: int) -> None:
        nonlocal spent, open_cost, most
        one = rng.choice(gateways)
        cost = rng.randint(1, 400)
        try:
            admission = await one.reserve(f"r{number}", prepaid=True, cost=cost)
        except InsufficientQuotaError as error:
            codes.add(error.code)
            return
        open_cost += cost
        most = max(most, spent + open_cost)
        await asyncio.sleep(rng.random() * 0.02)
        open_cost -= cost
        if rng.random() < 0.1:
            assert await one.reservations.end(release_of(f"r{number}"))
            return
        used = rng.randint(0, cost)
        spent += used
        ended = record(
            f"r{number}", cost_micros=used, is_prepaid=True, created_ms=admission.created_ms
        )
        assert await one.reservations.end(settlement(ended))

    for start in range(0, 600, 60):
        await asyncio.gather(*(client(number) for number in range(start, start + 60)))
    (status,) = await gateways[0].store.status(TENANT, [gateways[0].subjects[2]])
    assert status.cost_this_month == spent == sum(r.cost_micros for r in await usage(any_redis))
    assert status.credit_micros == ledger.granted - spent
    assert most <= ledger.granted
    assert spent > ledger.granted - 400
    assert codes == {"insufficient_credits"}


async def test_client_with_one_concurrent_request_can_send_the_next_at_once(
    desk: GatewayDesk,
) -> None:
    desk.subjects = (key_of(concurrent_requests=1), *desk.subjects[1:])
    for number in range(50):
        await desk.reserve(f"r{number}")
        with pytest.raises(RateLimitError, match="concurrent"):
            await desk.reserve("other")
        assert await desk.reservations.end(settlement(record(f"r{number}")))


async def test_headers_and_errors_come_from_the_limits(desk: GatewayDesk) -> None:
    desk.subjects = (key_of(requests_per_minute=1), project_of(), tenant_of(budget_micros=100))
    admission = await desk.reserve("r1", cost=40)
    assert admission.headers["x-ratelimit-remaining-requests"] == "0"
    assert admission.headers["x-budget-remaining"] == "0.00006"
    assert abs(admission.created_ms - time.time() * 1000) < 60_000
    with pytest.raises(InsufficientQuotaError) as caught:
        await desk.reserve("r2", cost=61)
    assert (caught.value.status, caught.value.code) == (402, "budget_exceeded")
    with pytest.raises(InsufficientQuotaError) as caught:
        await desk.reserve("r2", cost=61, is_openai=True)
    assert (caught.value.status, caught.value.code) == (429, "insufficient_quota")
    with pytest.raises(RateLimitError) as refused:
        await desk.reserve("r2")
    assert 30_000 < int(refused.value.headers()["retry-after-ms"]) <= 60_250
    assert desk.reservations.open_requests == 1


# -- lost commands and outages ---------------------------------------------------------------------


async def test_without_redis_limits_fail_closed(desk: GatewayDesk, line: Line) -> None:
    line.is_cut = True
    with pytest.raises(StoreUnavailableError, match="limits cannot be checked") as caught:
        await desk.reserve("r1")
    assert caught.value.headers()["retry-after-ms"] == "1000"
    line.is_cut = False
    await desk.reserve("r2")
    assert desk.reservations.open_requests == 1


async def test_without_the_ledger_durable_limits_fail_closed_and_others_do_not(
    desk: GatewayDesk,
    ledger: FakeLedger,
    any_redis: "Redis",
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ledger.is_away = True
    await desk.reserve("r1")
    desk.subjects = (*desk.subjects[:2], tenant_of(budget_micros=10))
    with pytest.raises(StoreUnavailableError):
        await desk.reserve("r2")
    assert await open_ids(any_redis) == {"r1"}
    ledger.is_away = False
    may_respond = asyncio.Event()
    ledger.meanwhile = may_respond.wait
    monkeypatch.setattr(reservations, "SEED_PATIENCE_SECONDS", 0.05)
    async with asyncio.timeout(PATIENCE_SECONDS):
        with pytest.raises(StoreUnavailableError, match="limits cannot be checked"):
            await desk.reserve("r3")
    monkeypatch.undo()
    may_respond.set()
    await desk.reserve("r2")
    # The seeding that the refused request began served the next one.
    assert ledger.questions == 2


async def test_reserve_with_a_lost_reply_is_released(
    desk: GatewayDesk, line: Line, any_redis: "Redis"
) -> None:
    desk.subjects = (key_of(requests_per_minute=10), *desk.subjects[1:])
    line.loses_answers = True
    with pytest.raises(StoreUnavailableError):
        await desk.reserve("r1")
    line.loses_answers = False

    async def is_released() -> bool:
        return not await open_ids(any_redis) and not len(desk.reservations._endings)

    await until(is_released)
    (status,) = await desk.store.status(TENANT, [desk.subjects[0]])
    assert status.requests_of_minute == 0
    assert await usage(any_redis) == []


async def test_reserve_of_a_disconnected_client_is_released(
    desk: GatewayDesk, line: Line, any_redis: "Redis"
) -> None:
    """Wherever the cancellation interrupts it, no reservation and no record remains."""
    desk.subjects = (key_of(requests_per_minute=1000), *desk.subjects[1:])
    tasks = []
    for number in range(60):
        task = asyncio.create_task(desk.reserve(f"r{number}"))
        tasks.append(task)
        for _ in range(number % 12):
            await asyncio.sleep(0)
        if number % 5 == 0:
            await asyncio.sleep(0.001)
        task.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    admitted = [f"r{n}" for n, result in enumerate(results) if isinstance(result, Admission)]
    assert len(admitted) < 60

    async def is_released() -> bool:
        return await open_ids(any_redis) == set(admitted)

    await until(is_released)
    assert await usage(any_redis) == []


async def test_lost_settle_is_repeated_and_counts_once(
    desk: GatewayDesk, line: Line, any_redis: "Redis", monkeypatch: pytest.MonkeyPatch
) -> None:
    await desk.reserve("r1")
    await desk.reserve("r2")
    line.is_cut = True
    assert not await desk.reservations.end(settlement(record("r1", cost_micros=1)))
    assert not await desk.reservations.end(release_of("r2"))
    # The first ending counts.
    assert not await desk.reservations.end(settlement(record("r2")))
    assert len(desk.reservations._endings) == 2
    line.is_cut = False

    async def has_arrived() -> bool:
        return len(desk.reservations._endings) == 0

    await until(has_arrived)
    assert [r.request_id for r in await usage(any_redis)] == ["r1"]
    assert await open_ids(any_redis) == set()
    assert await desk.reservations.end(settlement(record("r1")))
    assert await desk.reservations.end(release_of("r1"))
    assert len(await usage(any_redis)) == 1


async def test_slow_settle_blocks_no_caller_and_is_sent_once(
    desk: GatewayDesk, line: Line, any_redis: "Redis", monkeypatch: pytest.MonkeyPatch
) -> None:
    await desk.reserve("r1")
    monkeypatch.setattr(endings, "WAIT_SECONDS", 0.05)
    line.sent.clear()
    line.may_go_on.clear()
    assert not await desk.reservations.end(settlement(record("r1")))
    assert len(desk.reservations._endings) == 1, "it is still in flight"
    line.may_go_on.set()

    async def has_arrived() -> bool:
        return len(desk.reservations._endings) == 0

    await until(has_arrived)
    assert sum("r1" in args for args in line.sent) == 1
    assert len(await usage(any_redis)) == 1


async def test_settle_continues_when_its_caller_is_cancelled(
    desk: GatewayDesk, line: Line, any_redis: "Redis"
) -> None:
    await desk.reserve("r1")
    line.sent.clear()
    line.may_go_on.clear()
    task = asyncio.create_task(desk.reservations.end(settlement(record("r1"))))
    while not line.sent:
        await asyncio.sleep(0)
    await end_task(task)
    assert task.cancelled()
    line.may_go_on.set()

    async def has_arrived() -> bool:
        return len(await usage(any_redis)) == 1

    await until(has_arrived)
    assert await open_ids(any_redis) == set()


async def test_settle_is_recorded_when_redis_has_lost_the_reservation(
    desk: GatewayDesk, any_redis: "Redis"
) -> None:
    await desk.reserve("r1")
    await any_redis.flushall()
    await desk.reservations.renew()
    assert await desk.reservations.end(settlement(record("r1", outcome=Outcome.FAILED)))
    assert [r.outcome for r in await usage(any_redis)] == [Outcome.FAILED]


async def test_closing_sends_pending_endings_within_a_bound(
    any_redis: "Redis", ledger: FakeLedger, caplog: pytest.LogCaptureFixture
) -> None:
    line = Line(any_redis)
    one = GatewayDesk(line, ledger)
    for number in range(300):
        await one.reserve(f"r{number}")
    line.is_cut = True
    settles = (one.reservations.end(settlement(record(f"r{number}"))) for number in range(300))
    assert set(await asyncio.gather(*settles)) == {False}
    line.sent.clear()
    async with asyncio.timeout(PATIENCE_SECONDS):
        await one.reservations.aclose(seconds=0.3)
    assert line.sent, "it retries"
    assert len(one.reservations._endings) == 300
    line.is_cut = False
    await one.reservations._endings._send_some()
    assert len(one.reservations._endings) == 0, "one round sends all of them"
    await one.reservations.aclose(seconds=PATIENCE_SECONDS)
    assert len({r.request_id for r in await usage(any_redis)}) == 300
    assert caplog.text.count("cannot end reservations") == 1, "an outage is logged once"


async def test_memory_of_unconfirmed_endings_is_bounded(
    any_redis: "Redis", ledger: FakeLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endings, "MOST_ENDINGS", 20)
    monkeypatch.setattr(endings, "MOST_RELEASES", 10)
    line = Line(any_redis)
    one = GatewayDesk(line, ledger)
    for number in range(30):
        await one.reserve(f"r{number}")
    line.is_cut = True
    for number in range(30, 60):
        with pytest.raises(StoreUnavailableError):
            await one.reserve(f"r{number}")
    assert len(one.reservations._endings) == 10
    await asyncio.gather(*(one.reservations.end(settlement(record(f"r{n}"))) for n in range(30)))
    assert len(one.reservations._endings) == 20
    line.is_cut = False
    await one.reservations.aclose(seconds=PATIENCE_SECONDS)
    # The last ones are sent; the sweep settles the others.
    assert {r.request_id for r in await usage(any_redis)} == {f"r{n}" for n in range(10, 30)}


async def test_open_reservations_are_renewed_and_those_of_dead_gateways_expire(
    any_redis: "Redis", ledger: FakeLedger, clock: TestClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reservations, "RENEW_BATCH", 2)
    limited = tenant_of(concurrent_requests=8)
    dead, living = (GatewayDesk(Line(any_redis), ledger, limited) for _ in range(2))
    for number in range(5):
        await living.reserve(f"living{number}")
    for number in range(3):
        await dead.reserve(f"dead{number}")
    with pytest.raises(RateLimitError, match="concurrent"):
        await living.reserve("one more")
    await clock.advance(reservations.LEASE_MS - 1)
    await living.reservations.renew()
    await clock.advance(1)
    expired = await living.store.expired(BUCKET)
    assert {e.request_id for e in expired} == {"dead0", "dead1", "dead2"}
    for number in range(3):
        await living.reserve(f"again{number}")
    with pytest.raises(RateLimitError, match="concurrent"):
        await living.reserve("one more")


@pytest.mark.parametrize("ended_by", ["another gateway", "the sweep"])
async def test_disconnected_gateway_does_not_restore_ended_requests(
    any_redis: "Redis", ledger: FakeLedger, ended_by: str
) -> None:
    limited = key_of(concurrent_requests=1)
    late, other = (GatewayDesk(Line(any_redis), ledger, limited) for _ in range(2))
    kept = Kept("g1", 1, is_background=False, retention_ms=600_000)
    request = msgspec.structs.replace(late.request("r1"), kept=kept)
    created_ms = (await late.reservations.reserve(request, is_openai=False)).created_ms
    ended = record("r1", created_ms=created_ms)
    if ended_by == "another gateway":
        next_term = msgspec.structs.replace(kept, owner="g2", term=2)
        assert await other.reservations.adopt(request, next_term) is not None
        end = settlement(ended, kept=next_term, state=RequestState.FINISHED)
        assert await other.reservations.end(end)
    else:
        lease = await any_redis.zscore(keys.open_requests(BUCKET), "r1")
        paused = settlement(ended, state=RequestState.PAUSED, expired_ms=int(lease or 0))
        assert await other.store.end(paused)
    assert 0 < await any_redis.pttl(keys.request(BUCKET, "r1")) <= 600_000

    await late.reservations.renew()

    assert await open_ids(any_redis) == set()
    await other.reserve("r2")
    # The late settle has the same record.
    cancelled = record("r1", created_ms=created_ms, outcome=Outcome.CANCELLED)
    await late.reservations.end(settlement(cancelled, kept=kept, state=RequestState.PAUSED))
    assert await open_ids(any_redis) == {"r2"}
    # The owner of an earlier term settles nothing; after the sweep, the ledger adds what is new.
    number = 1 if ended_by == "another gateway" else 2
    assert [(each.request_id, each.created_ms) for each in await usage(any_redis)] == [
        ("r1", created_ms)
    ] * number


async def test_extension_that_waits_for_the_ledger_reserves_nothing_after_the_settlement(
    desk: GatewayDesk, ledger: FakeLedger, any_redis: "Redis"
) -> None:
    desk.subjects = (key_of(tokens_per_day=10**6, concurrent_requests=9), *desk.subjects[1:])
    created_ms = (await desk.reserve("r1")).created_ms
    await desk.store.unseed(TENANT, desk.subjects[0].subject)
    ended = record("r1", created_ms=created_ms, prompt_tokens=10, completion_tokens=7)
    ledger.meanwhile = partial(desk.reservations.end, settlement(ended))

    with pytest.raises(StoreUnavailableError):
        await desk.reservations.extend_to(
            desk.request("r1", completion=500), is_openai=False, sees=sees_all
        )

    assert await open_ids(any_redis) == set()
    key, *_ = await desk.store.status(TENANT, desk.subjects)
    assert (key.requests_today, key.tokens_today, key.concurrent_requests) == (1, 17, 0)


async def test_no_reservation_and_no_task_remains(desk: GatewayDesk, any_redis: "Redis") -> None:
    desk.subjects = (
        key_of(requests_per_minute=1000, concurrent_requests=1000),
        project_of(tokens_per_day=10**6),
        tenant_of(budget_micros=10**6),
    )
    before = len(asyncio.all_tasks())
    await asyncio.gather(*(desk.reserve(f"r{number}", cost=5) for number in range(100)))
    await asyncio.gather(
        *(desk.reservations.end(settlement(record(f"r{number}"))) for number in range(100))
    )
    assert desk.reservations.open_requests == 0
    assert len(desk.reservations._endings) == 0

    async def have_ended() -> bool:
        return len(asyncio.all_tasks()) <= before

    await until(have_ended)
    assert not {k for k in await bucket_keys(any_redis) if ":request:" in k or "running" in k}


async def test_live_requests_are_those_of_the_tenant_oldest_first(
    desk: GatewayDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "OPEN_AT_ONCE", 2)
    neighbour = next(name for name in map(str, range(10_000)) if keys.bucket_of(name) == BUCKET)
    own, theirs = [f"r{number}" for number in range(5)], ["x0", "x1"]
    for request_id in own:
        await desk.reserve(request_id)
    for request_id in theirs:
        request = msgspec.structs.replace(
            desk.request(request_id),
            tenant_id=neighbour,
            subjects=(subject(LimitScope.TENANT, neighbour),),
        )
        await desk.reservations.reserve(request, is_openai=False)
    for tenant, expected in ((TENANT, own), (neighbour, theirs)):
        found = await desk.store.live(tenant)
        assert found.is_complete
        assert sorted(request_id for _, request_id in found.requests) == expected
        assert found.requests == sorted(found.requests)
    monkeypatch.setattr(store_module, "MOST_OPEN", 6)
    assert not (await desk.store.live(TENANT)).is_complete
