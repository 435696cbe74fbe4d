"""Reconciliation: differences in Redis are reported and corrected once."""

import asyncio
from collections import Counter
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from sqlalchemy import update

from common import clock
from contract import keys
from gateway.accounts.keys.service import KeyService
from gateway.accounts.tenants.service import TenantService
from gateway.billing.credits.service import CreditService
from gateway.billing.credits.spending import prepaid_cost
from gateway.billing.ledger import reconcile as reconcile_module
from gateway.billing.ledger.drain import Drain
from gateway.billing.ledger.reconcile import Reconciler, ReconcileReport, reconcile
from gateway.billing.ledger.rollups import Rollups
from gateway.billing.ledger.store import read_balances
from gateway.limits.counters import FIELD, AccountNumbers
from gateway.limits.seeding import Seeder
from gateway.limits.store import QuotaStore
from gateway.platform.changes import ChangeAnnouncer
from gateway.platform.database.engine import Database
from gateway.platform.database.tables import PrepaidSumRow, RollupRow
from gateway.records.limits import Limits, LimitScope, SubjectLimits
from gateway.records.times import hour_of, to_ms, utc_now
from gateway.records.usage_record import UsageRecord, encode_usage
from tests.gateway.jobs.conftest import Append, command
from tests.support.accounts import plant
from tests.support.kinds import every_database
from tests.support.usage import HOUR_MS, usage_record

LIMITS = Limits(requests_per_day=1000, tokens_per_day=10**6, budget_micros=10**9)
BUCKET = keys.bucket_of("acme")
TENANT = SubjectLimits(LimitScope.TENANT, "acme", LIMITS)


@pytest.fixture(autouse=True)
def _hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reconcile_module, "PAUSE_SECONDS", 0.01)


@pytest.fixture
async def key(database: Database, redis: Redis) -> SubjectLimits:
    """A tenant with credits, and its key."""
    announcer = ChangeAnnouncer(redis)
    await TenantService(database, announcer).create("Acme", tenant_id="acme")
    created = await KeyService(database, announcer).create("acme", name="k")
    await CreditService(database, announcer).grant("acme", 1_000_000)
    return SubjectLimits(LimitScope.KEY, created.record.id, LIMITS)


def _record(number: int, key: SubjectLimits, **fields: Any) -> UsageRecord:
    known = {"credential_id": key.id, "project_id": None, "created_ms": clock.now_ms()}
    return usage_record(number, **(known | fields))


async def _seed(database: Database, redis: Redis, *subjects: SubjectLimits) -> None:
    await Seeder(QuotaStore(redis), partial(read_balances, database)).seed("acme", subjects)


async def _plant(redis: Redis, subject: SubjectLimits, **by: int) -> None:
    await command(redis, *plant(keys.account(BUCKET, subject.subject), **by))


async def _is_seeded(redis: Redis, subject: SubjectLimits) -> bool:
    account = keys.account(BUCKET, subject.subject)
    return bool(await command(redis, "HEXISTS", account, "seeded"))


@every_database
async def test_consistent_data_has_no_differences(
    database: Database, redis: Redis, append: Append, key: SubjectLimits
) -> None:
    await append(*(_record(number, key, is_prepaid=True) for number in range(5)))
    await Drain(redis, database).run()
    await append(*(_record(number, key) for number in range(5, 9)))
    await _seed(database, redis, key, TENANT)
    await append(_record(3, key))
    report = await reconcile(redis, database)
    assert report.is_clean, report
    assert (report.compared_accounts, report.busy_accounts) == (2, 0)
    assert await _is_seeded(redis, TENANT)


NUMBERS = {
    "requests": "requests_of_day",
    "tokens": "tokens_of_day",
    "audio_seconds": "audio_seconds_of_day",
    "cost_micros": "cost_of_month",
    "credit_micros": "credit",
}
"""Differences of an account, by their fields in `AccountNumbers`."""


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param([*NUMBERS], id="all"),
        *(
            pytest.param(
                [field], id=field, marks=() if field == "credit_micros" else pytest.mark.long
            )
            for field in NUMBERS
        ),
    ],
)
async def test_planted_differences_are_reported_and_corrected(
    database: Database, redis: Redis, append: Append, key: SubjectLimits, fields: list[str]
) -> None:
    records = [_record(n, key, is_prepaid=True, audio_seconds=n) for n in range(4)]
    await append(*records)
    await _seed(database, redis, key, TENANT)
    for field in fields:
        await _plant(redis, TENANT, **{field: -7})
    report = await reconcile(redis, database, rollup_days=1)
    expected = {
        "requests_of_day": 4,
        "tokens_of_day": sum(r.prompt_tokens + r.completion_tokens for r in records),
        "audio_seconds_of_day": 0 + 1 + 2 + 3,
        "cost_of_month": sum(r.cost_micros for r in records),
        "credit": 1_000_000 - sum(r.cost_micros for r in records),
    }
    found = {each.number: each for each in report.differences}
    assert len(report.differences) == len(fields)
    assert found.keys() == {NUMBERS[field] for field in fields}
    for number, each in found.items():
        assert (each.tenant_id, each.subject) == ("acme", "t:acme")
        assert (each.redis, each.ledger) == (expected[number] - 7, expected[number])
    assert not await _is_seeded(redis, TENANT)
    assert await _is_seeded(redis, key), "correct numbers are left alone"
    assert (await reconcile(redis, database, rollup_days=1)).is_clean
    await _seed(database, redis, TENANT)
    assert (await reconcile(redis, database, rollup_days=1)).is_clean


async def test_wrong_account_of_a_key_is_found_while_usage_comes_in(
    database: Database, redis: Redis, append: Append, key: SubjectLimits
) -> None:
    await _seed(database, redis, key, TENANT)
    await _plant(redis, key, requests=5)
    stop = asyncio.Event()

    async def settle_and_drain() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            record = _record(number, key)
            # All in one step, as a settle does it.
            pipeline = redis.pipeline(transaction=True)
            pipeline.execute_command("XADD", keys.usage(BUCKET), "*", "u", encode_usage(record))
            tokens = record.prompt_tokens + record.completion_tokens
            for subject in (key, TENANT):
                account = keys.account(BUCKET, subject.subject)
                usage = {"requests": 1, "tokens": tokens, "cost_micros": record.cost_micros}
                pipeline.execute_command(*plant(account, **usage))
            await pipeline.execute()
            if number % 5 == 0:
                await Drain(redis, database).run()
            await asyncio.sleep(0.05)

    busy = asyncio.create_task(settle_and_drain())
    report = await reconcile(redis, database, rollup_days=1)
    stop.set()
    await busy
    found = {(each.subject, each.number, each.redis - each.ledger) for each in report.differences}
    assert found == {(key.subject, "requests_of_day", 5)}


@pytest.mark.parametrize(
    ("looks", "busy"), [(3, 0), (reconcile_module.MOST_LOOKS, 1)], ids=["a while", "always"]
)
async def test_usage_drained_between_two_reads_is_no_difference(
    database: Database,
    redis: Redis,
    append: Append,
    key: SubjectLimits,
    monkeypatch: pytest.MonkeyPatch,
    looks: int,
    busy: int,
) -> None:
    await _seed(database, redis, key)
    derive = Reconciler._derive
    numbers = iter(range(looks))

    async def late(*args: Any) -> AccountNumbers:
        if (number := next(numbers, None)) is not None:
            # This usage is in the ledger when it is read, but was not in Redis before.
            records = [_record(100 * number + n, key) for n in range(number + 1)]
            await append(*records)
            tokens = sum(r.prompt_tokens + r.completion_tokens for r in records)
            cost = sum(r.cost_micros for r in records)
            await _plant(redis, key, requests=len(records), tokens=tokens, cost_micros=cost)
            await Drain(redis, database).run()
        return await derive(*args)

    monkeypatch.setattr(Reconciler, "_derive", late)
    report = await reconcile(redis, database, rollup_days=1)
    assert report.is_clean, report
    assert (report.compared_accounts, report.busy_accounts) == (1 - busy, busy)
    assert await _is_seeded(redis, key)


async def test_numbers_of_former_days_and_months_are_compared(
    database: Database, redis: Redis, append: Append, key: SubjectLimits
) -> None:
    """An unused account: its numbers are those of its last day and month."""
    old_ms = clock.now_ms() - 40 * 24 * HOUR_MS
    await append(_record(1, key, created_ms=old_ms), _record(2, key))
    account = keys.account(BUCKET, key.subject)
    moment = utc_now() - timedelta(days=40)
    record = _record(1, key)
    numbers = AccountNumbers(
        day=old_ms // (24 * HOUR_MS),
        month=moment.year * 100 + moment.month,
        requests=1,
        tokens=record.prompt_tokens + record.completion_tokens,
        cost_micros=record.cost_micros,
    )
    await command(redis, "HSET", account, "seeded", 1, FIELD, numbers.encode())
    await command(redis, "SADD", keys.accounts(BUCKET), key.subject)
    report = await reconcile(redis, database, rollup_days=1)
    assert report.is_clean, report
    assert report.compared_accounts == 1
    await _plant(redis, key, cost_micros=1)
    assert [
        each.number for each in (await reconcile(redis, database, rollup_days=1)).differences
    ] == ["cost_of_month"]


async def test_reserved_amounts_without_a_reservation_are_corrected(
    database: Database, redis: Redis, key: SubjectLimits
) -> None:
    await _seed(database, redis, key)
    await _plant(redis, key, reserved_requests=3, reserved_micros=99)
    await command(redis, "ZADD", keys.running(BUCKET, key.subject), 9e12, "cmpl-gone")
    report = await reconcile(redis, database, rollup_days=1)
    assert (report.corrected_reservations, report.forgotten_requests) == (1, 1)
    assert (await reconcile(redis, database, rollup_days=1)).is_clean


@every_database
async def test_wrong_sum_of_prepaid_requests_is_corrected(
    database: Database, redis: Redis, append: Append, key: SubjectLimits
) -> None:
    await append(*(_record(number, key, is_prepaid=True) for number in (1, 2)))
    await Drain(redis, database).run()
    await _seed(database, redis, TENANT)
    async with database.writing() as transaction:
        await transaction.execute(update(PrepaidSumRow).values(cost_micros=5))
    report = await reconcile(redis, database)
    assert (report.wrong_balances, report.differences) == (["acme"], [])
    async with database.reading() as transaction:
        assert await prepaid_cost(transaction, "acme") == 101 + 102
    assert (await reconcile(redis, database)).is_clean


async def test_wrong_sums_are_recomputed(
    database: Database, redis: Redis, append: Append, key: SubjectLimits
) -> None:
    now = utc_now()
    await append(*(_record(number, key, created_ms=to_ms(now)) for number in (1, 2)))
    await Drain(redis, database).run()
    await Rollups(database).make_all()
    assert (await reconcile(redis, database)).is_clean
    async with database.writing() as transaction:
        await transaction.execute(update(RollupRow).values(requests=RollupRow.requests + 1))
    report = await reconcile(redis, database)
    assert report.wrong_hours == [hour_of(now)]
    assert (await reconcile(redis, database)).is_clean
    async with database.reading() as transaction:
        rows = await transaction.scalars(
            RollupRow.__table__.select().with_only_columns(RollupRow.__table__.c.requests)
        )
        assert list(rows) == [2, 2]


async def test_account_of_an_unknown_subject_is_left_alone(
    database: Database, redis: Redis, key: SubjectLimits
) -> None:
    await command(redis, "SADD", keys.accounts(BUCKET), "k:jwt:bob", "t:gone", "x")
    assert (await reconcile(redis, database, rollup_days=1)).compared_accounts == 0


async def test_slice_continues_the_last_one_and_what_failed_is_compared_again(
    database: Database, redis: Redis, key: SubjectLimits, monkeypatch: pytest.MonkeyPatch
) -> None:
    await _seed(database, redis, key)
    await _plant(redis, key, requests=5)
    audited, failing, audit = Counter[int](), {BUCKET}, QuotaStore.audit_open

    async def audit_unless_failing(store: QuotaStore, bucket: int) -> Any:
        audited[bucket] += 1
        if bucket in failing:
            raise RedisConnectionError
        return await audit(store, bucket)

    monkeypatch.setattr(QuotaStore, "audit_open", audit_unless_failing)
    reconciler, report = Reconciler(redis, database, rollup_days=1), ReconcileReport()
    slices = 2 * keys.BUCKETS + 20
    for _ in range(slices):
        with suppress(RedisConnectionError):
            await reconciler.run(report, seconds=0)
    assert len(report.differences) == 1
    repeated = audited.pop(BUCKET)
    assert audited == {bucket: 1 for bucket in range(keys.BUCKETS) if bucket != BUCKET}
    assert 2 < repeated <= 20
    failing.clear()
    for _ in range(3):
        await reconciler.run(report, seconds=0)
    assert audited[BUCKET] == 1
