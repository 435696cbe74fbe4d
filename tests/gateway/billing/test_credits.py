"""Prepaid credits: granted, adjusted, and taken back when they expire."""

import asyncio
from collections.abc import AsyncIterator
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from msgspec.structs import replace
from redis.asyncio import Redis
from sqlalchemy import func, select

from contract import keys
from gateway.accounts.audit.log import SYSTEM, AuditLog
from gateway.accounts.tenants.service import TenantService
from gateway.billing.credits import service as service_module
from gateway.billing.credits import spending
from gateway.billing.credits.service import GRACE, CreditService
from gateway.billing.credits.spending import fold, prepaid_cost
from gateway.billing.ledger.drain import row_of
from gateway.billing.ledger.store import LedgerStore
from gateway.limits.counters import FIELD
from gateway.platform.changes import ChangeAnnouncer
from gateway.platform.database.engine import Database
from gateway.platform.database.paging import PageRequest
from gateway.platform.database.tables import LedgerRow, PrepaidSumRow
from gateway.platform.redis_client import connect
from gateway.records.errors import InvalidParameterError, NotFoundError, StoreUnavailableError
from gateway.records.records import MAX_AMOUNT_MICROS, Credit, CreditKind
from gateway.records.times import utc_now
from gateway.records.usage_record import Outcome
from tests.support.cases import all_cases, case
from tests.support.kinds import every_database
from tests.support.ledger import use
from tests.support.processes import free_port
from tests.support.usage import usage_record

SOON = timedelta(minutes=1)
LATE = SOON + GRACE + timedelta(minutes=1)


@pytest.fixture
async def credits_(database: Database, redis: Redis, tenants: TenantService) -> CreditService:
    await tenants.create("Acme", tenant_id="acme")
    return CreditService(database, ChangeAnnouncer(redis))


@pytest.fixture
async def deaf(database: Database) -> AsyncIterator[CreditService]:
    """The same with an unreachable Redis."""
    unreachable = connect(f"redis://127.0.0.1:{free_port()}", max_connections=1)
    yield CreditService(database, ChangeAnnouncer(unreachable))
    await unreachable.aclose()


def _account(tenant_id: str) -> str:
    return keys.account(keys.bucket_of(tenant_id), f"t:{tenant_id}")


async def _listed(service: CreditService) -> list[Credit]:
    return (await service.page("acme", PageRequest())).entries


async def _kinds(service: CreditService) -> list[tuple[CreditKind, int]]:
    return [(each.kind, each.amount_micros) for each in await _listed(service)]


async def _soon_expiring(
    service: CreditService, amount: int, *, after: Credit | None = None
) -> Credit:
    """Grant a credit that expires soon, or at the same interval after another grant."""
    begin = after.expires_at if after is not None and after.expires_at is not None else utc_now()
    return await service.grant("acme", amount, expires_at=begin + SOON)


@every_database
async def test_balance_is_granted_minus_used(credits_: CreditService, database: Database) -> None:
    await credits_.grant("acme", 10_000_000, note="first")
    await credits_.adjust("acme", -1_500_000, note="mistake")
    await credits_.adjust("acme", 7, note="other mistake")
    await use(database, "acme", 2_000_001)
    await use(database, "acme", 999, is_prepaid=False)
    await use(database, "other", 5)
    balance = await credits_.balance("acme")
    assert (balance.granted_micros, balance.spent_micros) == (8_500_007, 2_000_001)
    assert balance.micros == 6_500_006
    assert await _kinds(credits_) == [
        (CreditKind.GRANT, 10_000_000),
        (CreditKind.ADJUSTMENT, -1_500_000),
        (CreditKind.ADJUSTMENT, 7),
    ]


@every_database
async def test_prepaid_cost_equals_the_rows_while_they_are_added_and_folded(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spending, "FOLDED", 2)
    seen = set[int]()

    async def insert(number: int) -> None:
        """Settle two requests as lost; then repeat them, and add what one cost beyond that."""
        known: dict[str, Any] = {"cost_micros": 10**number, "is_prepaid": number != 4}
        lost = [
            usage_record(id_, tenant_id=f"t{id_ % 3}", outcome=Outcome.LOST, **known)
            for id_ in (number, number + 100)
        ]
        late = replace(lost[0], outcome=Outcome.FINISHED, cost_micros=10**number + 3)
        for records in (lost, [*lost, late]):
            async with database.writing() as transaction:
                await LedgerStore(transaction).insert([row_of(record) for record in records])
            await compare()
            await fold(database, seconds=0)
            await compare()

    async def compare() -> None:
        cost = func.coalesce(func.sum(LedgerRow.cost_micros), 0)
        rows = select(cost).where(LedgerRow.tenant_id == "t0", LedgerRow.is_prepaid)
        async with database.snapshot() as transaction:
            seen.add(found := await prepaid_cost(transaction, "t0"))
            assert found == await transaction.scalar(rows)

    await asyncio.gather(*map(insert, range(9)))
    await fold(database)
    async with database.reading() as transaction:
        costs = [await prepaid_cost(transaction, f"t{number}") for number in range(3)]
        assert await transaction.scalar(select(func.count()).select_from(PrepaidSumRow)) == 3
    assert costs == [101_101_110, 11_001_017, 110_100_119]
    assert len(seen) > 2, "comparisons were made between the insertions"


async def test_pages_are_contiguous(credits_: CreditService) -> None:
    for amount in (1, 2, 3):
        await credits_.grant("acme", amount)
    first = await credits_.page("acme", PageRequest(limit=2))
    rest = await credits_.page("acme", PageRequest(after=first.entries[-1].id, limit=2))
    assert [credit.amount_micros for credit in first.entries + rest.entries] == [1, 2, 3]
    assert (first.has_more, rest.has_more) == (True, False)


async def test_wrong_grant_is_refused(credits_: CreditService) -> None:
    for amount in [0, -1, MAX_AMOUNT_MICROS + 1]:
        with case(amount):
            with pytest.raises(InvalidParameterError, match="from 1 to") as caught:
                await credits_.grant("acme", amount)
            assert caught.value.param == "amount_micros"
            assert await _kinds(credits_) == []


async def test_wrong_adjustment_is_refused(credits_: CreditService) -> None:
    for amount, note, param in [
        (0, "why", "amount_micros"),
        (MAX_AMOUNT_MICROS + 1, "why", "amount_micros"),
        (-MAX_AMOUNT_MICROS - 1, "why", "amount_micros"),
        (1, "", "note"),
        (1, "  ", "note"),
        (1, "x" * 201, "note"),
        (1, "a\0b", "note"),
    ]:
        with case((amount, note, param)):
            with pytest.raises(InvalidParameterError) as caught:
                await credits_.adjust("acme", amount, note=note)
            assert caught.value.param == param
            assert await _kinds(credits_) == []


@all_cases(
    "expires_at",
    [utc_now() - timedelta(days=1), datetime.max.replace(tzinfo=timezone(timedelta(hours=-1)))],
    ids=["past", "after all time"],
)
async def test_wrong_expiry_is_refused(credits_: CreditService, expires_at: datetime) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        await credits_.grant("acme", 1, expires_at=expires_at)
    assert caught.value.param == "expires_at"


async def test_unknown_tenant_is_not_found(credits_: CreditService) -> None:
    for tenant_id in ("nobody", "a\0b"):
        with pytest.raises(NotFoundError, match="There is no tenant"):
            await credits_.grant(tenant_id, 1)
        with pytest.raises(NotFoundError, match="There is no tenant"):
            await credits_.balance(tenant_id)


async def test_changes_are_audited(credits_: CreditService, database: Database) -> None:
    granted = await credits_.grant("acme", 5, note="gift", actor="cli:ada")
    await credits_.adjust("acme", -2, note="oops", actor="key:key_9")
    async with database.reading() as transaction:
        newest, first, *_ = await AuditLog(transaction).entries(tenant_id="acme")
    assert (first.action, first.subject, first.actor) == ("credit.grant", granted.id, "cli:ada")
    assert first.details == {"amount_micros": 5, "note": "gift"}
    assert (newest.action, newest.actor) == ("credit.adjust", "key:key_9")
    assert newest.details == {"amount_micros": -2, "note": "oops"}


async def test_every_change_unseeds_the_balance_in_redis(
    credits_: CreditService, redis: Redis
) -> None:
    for change in (credits_.grant("acme", 5), credits_.adjust("acme", 1, note="x")):
        await redis.hset(_account("acme"), mapping={"seeded": 1, FIELD: "packed"})
        version = int(await redis.hget(_account("acme"), "v") or 0)
        await change
        kept = await redis.hgetall(_account("acme"))
        assert b"seeded" not in kept
        assert kept[FIELD.encode()] == b"packed"
        # Numbers derived before the change must not be written after it.
        assert int(kept[b"v"]) > version


async def test_changes_are_refused_during_a_redis_outage(
    credits_: CreditService, deaf: CreditService
) -> None:
    with pytest.raises(StoreUnavailableError, match="Nothing was changed"):
        await deaf.grant("acme", 5)
    assert await _kinds(credits_) == []


async def test_error_of_an_unannounced_change_advises_against_a_retry(
    credits_: CreditService, deaf: CreditService, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter([credits_._announcer.credits_changed, deaf._announcer.credits_changed])

    async def goes_away(tenant_id: str) -> None:
        await next(answers)(tenant_id)

    monkeypatch.setattr(credits_._announcer, "credits_changed", goes_away)
    with pytest.raises(StoreUnavailableError, match=r"is saved \(crd_.*\); do not repeat it"):
        await credits_.grant("acme", 5)
    assert await _kinds(credits_) == [(CreditKind.GRANT, 5)]


@every_database
async def test_rest_of_an_expired_grant_is_taken_back_once(
    credits_: CreditService, database: Database
) -> None:
    await credits_.grant("acme", 100)
    granted = await _soon_expiring(credits_, 50)
    await use(database, "acme", 30, at=granted.created_at)
    assert await credits_.expire_due(utc_now() + LATE) == 1
    (expiry,) = [c for c in await _listed(credits_) if c.kind is CreditKind.EXPIRY]
    assert (expiry.amount_micros, expiry.grant_id) == (-20, granted.id)
    assert (await credits_.balance("acme")).micros == 100
    assert await credits_.expire_due(utc_now() + LATE) == 0
    async with database.reading() as transaction:
        entry = (await AuditLog(transaction).entries())[0]
    assert (entry.action, entry.subject, entry.actor) == ("credit.expire", expiry.id, SYSTEM)
    assert entry.details["grant_id"] == granted.id


async def test_grant_stays_for_the_grace_period(credits_: CreditService) -> None:
    granted = await _soon_expiring(credits_, 50)
    assert granted.expires_at is not None
    assert await credits_.expire_due(granted.expires_at + GRACE) == 0
    assert await credits_.expire_due(granted.expires_at + GRACE + SOON) == 1
    assert (await credits_.balance("acme")).micros == 0


async def test_only_grants_past_the_grace_period_are_taken_back(credits_: CreditService) -> None:
    first = await _soon_expiring(credits_, 50)
    await _soon_expiring(credits_, 7, after=first)
    assert first.expires_at is not None
    assert await credits_.expire_due(first.expires_at + GRACE + SOON / 2) == 1
    expiries = [c.grant_id for c in await _listed(credits_) if c.grant_id is not None]
    assert expiries == [first.id]
    assert (await credits_.balance("acme")).micros == 7


async def test_used_up_grant_expires_without_change(
    credits_: CreditService, database: Database
) -> None:
    granted = await _soon_expiring(credits_, 50)
    await use(database, "acme", 60, at=granted.created_at)
    assert await credits_.expire_due(utc_now() + LATE) == 1
    assert await _kinds(credits_) == [(CreditKind.GRANT, 50), (CreditKind.EXPIRY, 0)]
    assert (await credits_.balance("acme")).micros == -10


@every_database
async def test_concurrent_expiries_take_back_once(
    credits_: CreditService, database: Database
) -> None:
    first = await _soon_expiring(credits_, 50)
    await _soon_expiring(credits_, 7, after=first)
    await use(database, "acme", 20, at=first.created_at)
    now = utc_now() + SOON + LATE
    assert sum(await asyncio.gather(*(credits_.expire_due(now) for _ in range(4)))) == 2
    assert sorted(await _kinds(credits_)) == [
        (CreditKind.EXPIRY, -30),
        (CreditKind.EXPIRY, -7),
        (CreditKind.GRANT, 7),
        (CreditKind.GRANT, 50),
    ]
    assert (await credits_.balance("acme")).micros == 0


async def test_usage_that_arrives_late_is_paid_by_other_credits(
    credits_: CreditService, database: Database
) -> None:
    await credits_.grant("acme", 100)
    granted = await _soon_expiring(credits_, 50)
    later = await credits_.grant("acme", 10, expires_at=utc_now() + timedelta(minutes=10))
    assert await credits_.expire_due(utc_now() + LATE) == 1
    await use(database, "acme", 15, at=granted.created_at)
    assert (await credits_.balance("acme")).micros == 95
    # It was admitted before the last grant, which therefore does not pay for it.
    assert await credits_.expire_due(utc_now() + timedelta(minutes=10) + LATE) == 1
    expiries = {c.grant_id: c.amount_micros for c in await _listed(credits_) if c.grant_id}
    assert expiries == {granted.id: -50, later.id: -10}
    assert (await credits_.balance("acme")).micros == 85


async def test_redis_failure_leaves_expired_grants_to_the_next_run(
    credits_: CreditService, deaf: CreditService, monkeypatch: pytest.MonkeyPatch
) -> None:
    await _soon_expiring(credits_, 50)
    with pytest.raises(StoreUnavailableError):
        await deaf.expire_due(utc_now() + LATE)
    assert await credits_.expire_due(utc_now() + LATE) == 1


async def test_failure_for_one_tenant_delays_no_other_expiry(
    credits_: CreditService, tenants: TenantService, monkeypatch: pytest.MonkeyPatch
) -> None:
    await tenants.create("Other", tenant_id="other")
    for tenant_id in ("acme", "other"):
        await credits_.grant(tenant_id, 50, expires_at=utc_now() + SOON)
    expiries = service_module._expiries

    async def fail(transaction: Any, tenant_id: str, now: datetime) -> list[Credit]:
        if tenant_id == "acme":
            raise ZeroDivisionError
        return await expiries(transaction, tenant_id, now)

    monkeypatch.setattr(service_module, "_expiries", fail)
    with pytest.raises(ZeroDivisionError):
        await credits_.expire_due(utc_now() + LATE)
    assert [(await credits_.balance(each)).micros for each in ("acme", "other")] == [50, 0]


@every_database
async def test_concurrent_changes_all_count(credits_: CreditService) -> None:
    await asyncio.gather(*(credits_.grant("acme", 3) for _ in range(8)))
    assert (await credits_.balance("acme")).micros == 24
