"""Seeding: durable numbers are derived during concurrent settles, drains and grants."""

import asyncio
import random
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from contract import keys
from gateway.limits import seeding
from gateway.limits.replies import Admitted, AuditResult, NeedsSeed, SubjectStatus
from gateway.limits.seeding import Seeder
from gateway.limits.store import QuotaStore
from gateway.records.errors import StoreUnavailableError
from gateway.records.limits import LimitName, LimitScope, SubjectLimits, Window
from gateway.records.usage_record import encode_usage
from tests.gateway.limits.building import (
    BUCKET,
    DAY_MS,
    NOON,
    TENANT,
    Desk,
    TestClock,
    key_of,
    open_ids,
    project_of,
    record,
    release_of,
    seed,
    settlement,
    spend_limit,
    tenant_of,
    usage,
)
from tests.gateway.limits.fake_ledger import FakeLedger
from tests.support.accounts import plant
from tests.support.patience import PATIENCE_SECONDS

KEY = key_of(requests_per_day=1000, tokens_per_day=10**6, budget_micros=10**6)
TENANTS = tenant_of(budget_micros=10**6)
HOUR_MS = 3_600_000


@pytest.fixture
def ledger() -> FakeLedger:
    return FakeLedger()


@pytest.fixture
def seeder(store: QuotaStore, ledger: FakeLedger) -> Seeder:
    return Seeder(store, ledger)


async def status_of(store: QuotaStore, subject: SubjectLimits) -> SubjectStatus:
    (status,) = await store.status(TENANT, [subject])
    return status


async def append(redis: "Redis", *request_ids: str, **fields: int | bool | str) -> None:
    """Append records for the ledger without a settle."""
    for request_id in request_ids:
        content = encode_usage(record(request_id, **fields))
        await redis.xadd(keys.usage(BUCKET), {"u": content})


async def test_seed_adds_records_that_the_ledger_lacks(
    store: QuotaStore,
    clock: TestClock,
    any_redis: "Redis",
    seeder: Seeder,
    ledger: FakeLedger,
) -> None:
    """Each request counts once, as its largest record: in the ledger, in the stream, or in both."""
    ledger.granted = 1_000
    await append(any_redis, "a", "b", "b", prompt_tokens=1, cost_micros=10, is_prepaid=True)
    await ledger.drain(any_redis, most=1, deletes=False)
    await append(any_redis, "b", "c", prompt_tokens=1, cost_micros=99, is_prepaid=True)
    await append(any_redis, "yesterday", created_ms=NOON - DAY_MS, cost_micros=100)
    await append(any_redis, "last month", created_ms=NOON - 20 * DAY_MS, cost_micros=7)
    await append(any_redis, "other", credential_id="key_zz", cost_micros=1000, is_prepaid=True)
    await append(any_redis, "foreign", tenant_id="else", cost_micros=10**6, is_prepaid=True)
    await seeder.seed(TENANT, [KEY, TENANTS])
    key, tenant = await status_of(store, KEY), await status_of(store, TENANTS)
    assert (key.requests_today, key.tokens_today, key.cost_this_month) == (3, 3, 308)
    assert key.credit_micros is None
    assert (tenant.requests_today, tenant.cost_this_month) == (4, 1308)
    assert tenant.credit_micros == 1_000 - 10 - 99 - 99 - 1000
    project = project_of(budget_micros=1)
    await seeder.seed(TENANT, [project])
    assert (await status_of(store, project)).cost_this_month == 1308


@pytest.mark.parametrize("fields", [{"u": b"\xff"}, {"u": b"\x80"}, {"v": b""}], ids=str)
async def test_unreadable_record_does_not_count(
    store: QuotaStore,
    clock: TestClock,
    any_redis: "Redis",
    seeder: Seeder,
    fields: Any,
) -> None:
    await append(any_redis, "a", prompt_tokens=1)
    await any_redis.xadd(keys.usage(BUCKET), fields)
    await append(any_redis, "b", prompt_tokens=1)
    await seeder.seed(TENANT, [KEY])
    assert (await status_of(store, KEY)).requests_today == 2


async def test_more_records_than_a_page_are_read(
    store: QuotaStore, clock: TestClock, any_redis: "Redis", seeder: Seeder
) -> None:
    await append(any_redis, *(f"r{number}" for number in range(400)), prompt_tokens=2)
    await append(any_redis, "last", prompt_tokens=5)
    assert len(await usage(any_redis)) == 401
    await seeder.seed(TENANT, [KEY])
    status = await status_of(store, KEY)
    assert (status.requests_today, status.tokens_today) == (401, 805)


@pytest.mark.parametrize("happens", ["settle", "settle without reservation", "unseed", "grant"])
async def test_stale_numbers_are_derived_again_before_writing(
    store: QuotaStore,
    clock: TestClock,
    any_redis: "Redis",
    seeder: Seeder,
    ledger: FakeLedger,
    happens: str,
) -> None:
    ledger.granted = 100
    one = Desk(store, (key_of(), project_of(), tenant_of()))
    await one.admit("open")
    ended, unknown = (
        record(request_id, cost_micros=40, is_prepaid=True) for request_id in ("open", "unknown")
    )

    async def settle() -> None:
        assert await store.end(settlement(ended))
        await ledger.drain(any_redis)

    async def grant() -> None:
        ledger.granted += 60
        await store.unseed(TENANT, TENANTS.subject)

    ledger.meanwhile = {
        "settle": settle,
        "settle without reservation": lambda: store.end(settlement(unknown)),
        "unseed": lambda: store.unseed(TENANT, TENANTS.subject),
        "grant": grant,
    }[happens]
    await seeder.seed(TENANT, [TENANTS])
    assert ledger.questions == 2
    status = await status_of(store, TENANTS)
    left, cost = {"grant": (160, 0), "unseed": (100, 0)}.get(happens, (60, 40))
    assert (status.credit_micros, status.cost_this_month) == (left, cost)


async def test_seed_of_an_older_version_or_of_a_seeded_account_writes_nothing(
    store: QuotaStore, clock: TestClock
) -> None:
    assert await seed(store, KEY, requests=5)
    assert not await seed(store, KEY, requests=6)
    await store.unseed(TENANT, KEY.subject)
    assert not await seed(store, KEY, requests=7, version=0)
    assert await seed(store, KEY, requests=8)
    assert (await status_of(store, KEY)).requests_today == 8


async def test_unseeding_keeps_what_open_reservations_hold(
    store: QuotaStore, clock: TestClock, seeder: Seeder, ledger: FakeLedger
) -> None:
    ledger.granted = 500
    one = Desk(store, (KEY, project_of(), tenant_of()), is_prepaid=True)
    await seeder.seed(TENANT, [KEY, TENANTS])
    await one.admit("r1", cost=300)
    for subject in (KEY, TENANTS):
        await store.unseed(TENANT, subject.subject)
        assert isinstance(await one.reserve(cost=1), NeedsSeed)
        await seeder.seed(TENANT, [subject])
    refused = await one.refuse(cost=201)
    assert (refused.limit, refused.value, refused.used) == (None, 500, 300)
    await one.admit("r2", cost=200)
    assert await one.settle("r1", cost=1)
    assert (await status_of(store, KEY)).cost_this_month == 201


async def test_tenant_that_becomes_prepaid_has_its_credit_derived(
    store: QuotaStore, clock: TestClock, seeder: Seeder, ledger: FakeLedger
) -> None:
    await seed(store, TENANTS)
    ledger.granted = 50
    one = Desk(store, (key_of(), project_of(), TENANTS), is_prepaid=True)
    assert await one.reserve(cost=1) == NeedsSeed((TENANTS,))
    await seeder.seed(TENANT, [TENANTS])
    assert (await one.refuse(cost=51)).value == 50


async def test_concurrent_requests_of_one_account_read_the_ledger_once(
    store: QuotaStore, clock: TestClock, seeder: Seeder, ledger: FakeLedger
) -> None:
    may_answer = asyncio.Event()

    async def hesitate() -> None:
        await may_answer.wait()

    ledger.meanwhile = hesitate
    waiting = [asyncio.create_task(seeder.seed(TENANT, [KEY])) for _ in range(50)]
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not ledger.questions:
            await asyncio.sleep(0.001)
    waiting[0].cancel()
    may_answer.set()
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert isinstance(results[0], asyncio.CancelledError)
    assert results[1:] == [None] * 49
    assert ledger.questions == 1
    assert (await status_of(store, KEY)).is_seeded


async def test_unreachable_ledger_and_unreachable_redis_give_the_same_error(
    store: QuotaStore, clock: TestClock, seeder: Seeder, ledger: FakeLedger
) -> None:
    ledger.is_away = True
    with pytest.raises(StoreUnavailableError):
        await seeder.seed(TENANT, [KEY])
    ledger.is_away = False
    await seeder.seed(TENANT, [KEY])

    class Away:
        async def execute_command(self, *_args: object, **_options: object) -> object:
            raise RedisConnectionError("away")

    with pytest.raises(StoreUnavailableError, match="limits cannot be checked"):
        await Seeder(QuotaStore(Away()), ledger).seed(TENANT, [KEY])


async def test_seeding_ends_if_numbers_keep_changing(
    store: QuotaStore,
    clock: TestClock,
    seeder: Seeder,
    ledger: FakeLedger,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(seeding, "PAUSE_SECONDS", 0.001)

    async def again() -> None:
        await store.unseed(TENANT, KEY.subject)
        ledger.meanwhile = again

    ledger.meanwhile = again
    with pytest.raises(StoreUnavailableError):
        await seeder.seed(TENANT, [KEY])
    assert ledger.questions == seeding.MOST_TRIES


async def test_numbers_stay_right_through_random_seeds_settles_drains_and_grants(
    store: QuotaStore, clock: TestClock, any_redis: "Redis", ledger: FakeLedger
) -> None:
    """All operations at once; at the end each account equals the final ledger."""
    rng = random.Random(4)
    ledger.granted = 10**9
    ledger.delay_seconds = 0.001
    seeders = [Seeder(store, ledger), Seeder(store, ledger)]
    one = Desk(store, (KEY, project_of(requests_per_day=10**6), TENANTS), is_prepaid=True)
    is_over = asyncio.Event()

    async def client(name: int) -> None:
        for number in range(25):
            request_id = f"{name}-{number}"
            while isinstance(answer := await one.reserve(request_id, cost=50), NeedsSeed):
                # Seeding ends if numbers keep changing; the request that needs them retries.
                with suppress(StoreUnavailableError):
                    await rng.choice(seeders).seed(TENANT, answer.subjects)
            await asyncio.sleep(rng.random() * 0.01)
            if rng.random() < 0.2:
                assert await store.end(release_of(request_id))
            else:
                await one.settle(request_id, cost=rng.randint(0, 50))

    async def disturb() -> None:
        while not is_over.is_set():
            await asyncio.sleep(0.02)
            await ledger.drain(any_redis, most=rng.randint(1, 9), deletes=rng.random() < 0.5)
            ledger.granted += 1
            await store.unseed(TENANT, rng.choice(one.subjects).subject)
            await store.unseed(TENANT, TENANTS.subject)

    disturbing = asyncio.create_task(disturb())
    await asyncio.gather(*(client(name) for name in range(8)))
    is_over.set()
    await disturbing
    await seeders[0].seed(TENANT, one.subjects)
    statuses = await store.status(TENANT, one.subjects)
    await ledger.drain(any_redis)
    assert len(ledger.records) > 100
    cost = sum(r.cost_micros for r in ledger.records.values())
    for status in statuses:
        assert status.requests_today == len(ledger.records)
        assert status.cost_this_month == cost
    assert statuses[2].credit_micros == ledger.granted - cost


async def test_audit_corrects_the_reserved_amounts_of_accounts(
    store: QuotaStore, clock: TestClock, any_redis: "Redis"
) -> None:
    project = project_of(requests_per_day=10)
    one = Desk(store, (KEY, project, tenant_of(concurrent_requests=10)), is_prepaid=True)
    await one.seed(credit_micros=10_000)
    await one.admit("r1", cost=100)
    await one.admit("r2", cost=100)
    statuses = await store.status(TENANT, one.subjects)
    execute: Any = any_redis.execute_command
    account = keys.account(BUCKET, KEY.subject)
    await execute(*plant(account, reserved_requests=7))
    payer = keys.account(BUCKET, TENANTS.subject)
    await execute(*plant(payer, reserved_credit_micros=-200))
    await any_redis.zadd(keys.running(BUCKET, TENANTS.subject), {"nobody": NOON + 10**9})
    assert await store.audit_open(BUCKET) == AuditResult(2, 1)
    assert await store.status(TENANT, one.subjects) == statuses
    assert await store.audit_open(BUCKET) == AuditResult(0, 0)
    await any_redis.zadd(keys.open_requests(BUCKET), {"vanished": NOON + 10**9})
    assert await store.audit_open(BUCKET) == AuditResult(0, 0)
    assert await open_ids(any_redis) == {"r1", "r2"}
    # Accounts without a reservation are checked too, and missing accounts are dropped.
    for request_id in ("r1", "r2"):
        assert await one.settle(request_id)
    await execute(*plant(account, reserved_micros=5))
    await any_redis.delete(keys.account(BUCKET, project_of().subject))
    assert await store.audit_open(BUCKET) == AuditResult(1, 0)
    assert await any_redis.smembers(keys.accounts(BUCKET)) == {
        KEY.subject.encode(),
        TENANTS.subject.encode(),
    }


async def test_audit_adds_reservations_older_than_the_limits_of_accounts(
    store: QuotaStore, clock: TestClock
) -> None:
    free = Desk(store, (key_of(), project_of(), tenant_of()))
    await free.admit("old", cost=70)
    limited = Desk(store, (key_of(budget_micros=100), project_of(), tenant_of()))
    await limited.seed(limited.subjects[0])
    assert await store.audit_open(BUCKET) == AuditResult(0, 0)
    refused = await limited.refuse(cost=31)
    assert (refused.limit, refused.used) == (LimitName.BUDGET, 70)
    assert await free.settle("old", cost=10)
    assert (await limited.refuse(cost=91)).used == 10
    assert refused.subject.scope is LimitScope.KEY


async def test_windows_of_a_spend_limit_move_with_the_time_zone(
    store: QuotaStore, clock: TestClock, any_redis: "Redis", seeder: Seeder
) -> None:
    """What is not of the new window does not count, and what was held of the old one does."""
    limit = spend_limit(window=Window.DAY, amount_micros=1_000)
    await append(any_redis, "early", created_ms=NOON - 5 * HOUR_MS, cost_micros=300)
    old, new = limit.subject_at(NOON), replace(limit, time_zone="Etc/GMT-13").subject_at(NOON)
    await seeder.seed(TENANT, [old])
    desk = Desk(store, (old,))
    await desk.admit("r1", cost=50)
    desk.subjects = (new,)
    assert await desk.reserve("r2", cost=1) == NeedsSeed((new,))
    await seeder.seed(TENANT, [new])
    await desk.admit("r2", cost=20)
    assert (await status_of(store, new)).cost_this_month == 20
    await desk.settle("r1", cost=40, spend_limits=(old.subject,))
    # The account counts the new window, in which the script cannot know of the request.
    assert not (await status_of(store, new)).is_seeded
    await seeder.seed(TENANT, [new])
    assert (await status_of(store, new)).cost_this_month == 60
    # Of a window that the clock of the gateway does not know, nothing is admitted.
    await clock.advance(3 * DAY_MS)
    assert isinstance(await desk.reserve("r3", cost=1), NeedsSeed)
    with pytest.raises(StoreUnavailableError, match="clocks"):
        await seeder.seed(TENANT, [new])
    extended = await desk.extend("r2", cost=5_000, completion=21)
    assert isinstance(extended, Admitted), "it was admitted in a window that is over"
