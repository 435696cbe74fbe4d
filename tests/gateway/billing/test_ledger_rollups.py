"""Sums of the ledger equal its rows, also under concurrent inserts."""

import asyncio
from bisect import bisect_left
from collections import defaultdict
from datetime import UTC, datetime, timedelta
from functools import cache
from random import Random
from typing import Any

import pytest
from sqlalchemy import delete, func, select, text, update

from contract.tier import ServiceTier
from gateway.accounts.tenants.service import TenantService
from gateway.billing.ledger import rollups as rollups_module
from gateway.billing.ledger.drain import row_of
from gateway.billing.ledger.rollups import Rollups
from gateway.billing.ledger.store import LedgerStore
from gateway.platform.database.engine import Database
from gateway.platform.database.tables import (
    FAILED_OUTCOMES,
    FIRST_TOKENS,
    AdapterRow,
    DirtyHourRow,
    LedgerRow,
    RollupPeriod,
    RollupRow,
    ServiceRollupRow,
)
from gateway.records.adapters import AdapterState
from gateway.records.times import day_of, hour_of, to_time
from gateway.records.usage_record import BOUNDS_MS, Outcome, UsageRecord
from tests.support.kinds import every_database
from tests.support.usage import HOUR_MS, NOON_MS, usage_record

NOON = datetime(2026, 11, 20, 12, tzinfo=UTC)
SINCE, UNTIL = NOON - timedelta(days=2), NOON + timedelta(days=2)


@pytest.fixture(autouse=True)
def _few_tenants_show_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollups_module, "LEAST_TENANTS", 2)
    monkeypatch.setattr(rollups_module, "LEAST_FIRST_TOKENS", 3)
    # The statements of other tests have other numbers.
    for name in ("_sums", "_insertion"):
        made = getattr(rollups_module, name).__wrapped__
        monkeypatch.setattr(rollups_module, name, cache(made))


async def _insert(database: Database, *records: UsageRecord) -> None:
    async with database.writing() as transaction:
        await LedgerStore(transaction).insert([row_of(record) for record in records])


def _sums_of(rows: list[LedgerRow]) -> dict[tuple[Any, ...], list[int | None]]:
    """The expected sums, added row by row."""
    sums: dict[tuple[Any, ...], list[int | None]]
    sums = defaultdict(lambda: [0] * 7 + [None] * len(FIRST_TOKENS))
    for row in rows:
        for period, start in (
            (RollupPeriod.HOUR, hour_of(row.created_at)),
            (RollupPeriod.DAY, day_of(row.created_at)),
        ):
            holder = (row.tenant_id, row.project_id or "", row.credential_id, row.model)
            total = sums[(period, start, *holder, row.service_tier)]
            for place, number in enumerate(
                (
                    int(_is_first(row)),
                    int(_is_first(row) and row.outcome in FAILED_OUTCOMES),
                    row.prompt_tokens,
                    row.cached_tokens,
                    row.completion_tokens,
                    row.audio_seconds,
                    row.cost_micros,
                )
            ):
                total[place] = (total[place] or 0) + number
            _count_first_token(total, 7, row)
    return dict(sums)


def _is_first(row: LedgerRow) -> bool:
    return ".late" not in row.request_id


def _count_first_token(total: list[int | None], offset: int, row: LedgerRow) -> None:
    if row.first_token_ms:
        place = offset + bisect_left(BOUNDS_MS, row.first_token_ms)
        total[place] = (total[place] or 0) + 1


def _service_of(rows: list[LedgerRow]) -> dict[tuple[Any, ...], list[int | None]]:
    """The expected sums for the status page, added row by row."""
    counts: dict[tuple[datetime, str], list[int]] = defaultdict(lambda: [0, 0])
    times: dict[tuple[datetime, str], dict[str, list[int | None]]]
    times = defaultdict(lambda: defaultdict(lambda: [None] * len(FIRST_TOKENS)))
    for row in rows:
        has_failed = row.outcome in (Outcome.LOST, Outcome.TIMED_OUT) or (
            row.outcome is Outcome.FAILED and row.code != "invalid_value"
        )
        if row.service_tier is not ServiceTier.BATCH:
            key = hour_of(row.created_at), row.model.removesuffix(":poet")
            counts[key][0] += _is_first(row) and (row.outcome is Outcome.FINISHED or has_failed)
            counts[key][1] += _is_first(row) and has_failed
            _count_first_token(times[key][row.tenant_id], 0, row)
    sums: dict[tuple[Any, ...], list[int | None]] = {}
    for (hour, model), own in counts.items():
        shown: list[int | None] = [None] * len(FIRST_TOKENS)
        totals = [sum(each or 0 for each in of) for of in times[hour, model].values()]
        if len([each for each in totals if each]) >= 2 and sum(totals) >= 3:
            weighted = [
                [10_000 * (each or 0) // total for each in of]
                for of, total in zip(times[hour, model].values(), totals, strict=True)
                if total
            ]
            shown = [sum(each) for each in zip(*weighted, strict=True)]
        for period, start in ((RollupPeriod.HOUR, hour), (RollupPeriod.DAY, day_of(hour))):
            known = sums.setdefault((period, start, model), [0, 0, *[None] * len(FIRST_TOKENS)])
            for place, more in enumerate((*own, *shown)):
                known[place] = more if known[place] is None else (known[place] or 0) + (more or 0)
    return sums


async def _check(database: Database) -> None:
    async with database.reading() as transaction:
        rows = list(await transaction.scalars(select(LedgerRow)))
        for table, expected, width in (
            (RollupRow, _sums_of(rows), 7),
            (ServiceRollupRow, _service_of(rows), 3),
        ):
            sums = await transaction.execute(select(*table.__table__.c.values()))
            assert {tuple(row[:width]): list(row[width:]) for row in sums} == expected
        assert await transaction.scalar(select(func.count()).select_from(DirtyHourRow)) == 0


async def _add_adapters(database: Database) -> None:
    """Add an adapter of each model of `_random_record`."""
    tenants = TenantService(database, announcer=None)  # type: ignore[arg-type] # Announces nothing.
    await tenants.create("Acme", tenant_id="acme")
    async with database.writing() as transaction:
        transaction.add_all(
            AdapterRow(
                id=f"adapter_{number}",
                tenant_id="acme",
                name="poet",
                base_model=model,
                source="",
                is_shared=False,
                state=AdapterState.DELETED,
                reason="",
                sha256="",
                rank=8,
                target_modules=[],
                size=0,
                is_stored=False,
                created_at=NOON,
                claimed_until=NOON,
            )
            for number, model in enumerate(["m", "org/n:8b", "m"])
        )


def _random_record(random: Random, number: int) -> UsageRecord:
    return usage_record(
        number,
        request_id=f"cmpl-{number}{random.choice(['', '', '.late', '.late2'])}",
        tenant_id=random.choice(["acme", "other"]),
        project_id=random.choice(["prj_1", "prj_2", None]),
        credential_id=random.choice(["key_1", "key_2", "jwt:bob"]),
        model=random.choice(["m", "org/n:8b"]),
        adapter=random.choice(["", "", "poet"]),
        service_tier=random.choice(list(ServiceTier)),
        outcome=random.choice(list(Outcome)),
        code=random.choice(["engine_dead", "invalid_value"]),
        first_token_ms=random.choice([0, 1, 8, 9, 250, 10**9]),
        created_ms=NOON_MS + random.randrange(-6 * 24, 6 * 24) * HOUR_MS // 4,
    )


@every_database
@pytest.mark.parametrize("times", [2, pytest.param(12, marks=pytest.mark.long)])
async def test_sums_equal_the_rows_including_late_ones(database: Database, times: int) -> None:
    random, rollups = Random(5), Rollups(database)
    await _add_adapters(database)
    for start in range(0, times * 50, 50):
        await _insert(database, *(_random_record(random, start + n) for n in range(50)))
        assert await rollups.make_all() > 0
        await _check(database)
    assert await rollups.make_all() == 0
    assert await rollups.wrong_hours(since=SINCE, until=UNTIL) == []


@every_database
async def test_row_on_the_hour_belongs_to_the_hour_that_begins(database: Database) -> None:
    await _insert(
        database,
        usage_record(1, created_ms=NOON_MS),
        usage_record(2, created_ms=NOON_MS - 1),
        usage_record(3, created_ms=NOON_MS + 12 * HOUR_MS),
    )
    assert await Rollups(database).make_all() == 3
    await _check(database)


@every_database
async def test_rows_added_during_a_rollup_are_never_missed(database: Database) -> None:
    random, rollups = Random(6), Rollups(database)
    await _add_adapters(database)

    async def insert_some(offset: int) -> None:
        for number in range(offset, offset + 25):
            await _insert(database, _random_record(random, number))
            await asyncio.sleep(0)

    async def make_some() -> None:
        for _ in range(8):
            await rollups.make_all()
            await asyncio.sleep(0.005)

    await asyncio.gather(insert_some(0), insert_some(100), make_some(), make_some())
    await rollups.make_all()
    await _check(database)


async def test_more_marks_than_one_transaction_takes_are_processed(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollups_module, "MARKS", 3)
    for number in range(10):
        await _insert(database, usage_record(number, created_ms=NOON_MS + number * HOUR_MS))
    assert await Rollups(database).make_all() == 10
    await _check(database)


async def test_hour_that_fails_delays_no_other(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3):
        await _insert(database, usage_record(number, created_ms=NOON_MS + number * HOUR_MS))
    replace = rollups_module._replace

    async def fail(transaction: Any, kind: Any, period: Any, start: datetime) -> None:
        if start == to_time(NOON_MS):
            raise ZeroDivisionError
        await replace(transaction, kind, period, start)

    with monkeypatch.context() as patch:
        patch.setattr(rollups_module, "_replace", fail)
        with pytest.raises(ZeroDivisionError):
            await Rollups(database).make_all()
    assert await Rollups(database).make_all() == 1
    await _check(database)


async def test_mark_added_during_a_rollup_stays(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows of an unread mark may be in the sums or not: it must be processed later."""
    await _insert(database, usage_record(1))
    remove = rollups_module._remove_marks
    marks: list[int] = []

    async def late(transaction: Any, ids: Any) -> None:
        if not marks:
            await transaction.execute(
                text("INSERT INTO usage_dirty_hours (hour) SELECT hour FROM usage_dirty_hours")
            )
        marks.extend(ids)
        await remove(transaction, ids)

    monkeypatch.setattr(rollups_module, "_remove_marks", late)
    assert await Rollups(database).make_all() == 2, "the late mark causes another sum of the hour"
    assert len(marks) == len(set(marks)) == 2
    await _check(database)


@every_database
async def test_wrong_sums_are_detected_unless_they_are_marked(database: Database) -> None:
    rollups = Rollups(database)
    hours = [usage_record(n, created_ms=NOON_MS + n * HOUR_MS) for n in range(3)]
    await _insert(database, *hours)
    await rollups.make_all()
    async with database.writing() as transaction:
        await transaction.execute(
            update(RollupRow)
            .where(RollupRow.period == RollupPeriod.HOUR, RollupRow.start_at == NOON)
            .values(cost_micros=RollupRow.cost_micros + 1)
        )
        await transaction.execute(
            delete(RollupRow).where(
                RollupRow.period == RollupPeriod.HOUR,
                RollupRow.start_at == NOON + timedelta(hours=2),
            )
        )
        # Another release's process has summed this one.
        await transaction.execute(
            delete(ServiceRollupRow).where(
                ServiceRollupRow.period == RollupPeriod.HOUR,
                ServiceRollupRow.start_at == NOON + timedelta(hours=1),
            )
        )
    wrong = await rollups.wrong_hours(since=NOON, until=NOON + timedelta(hours=3))
    assert wrong == [NOON + timedelta(hours=number) for number in range(3)]
    async with database.writing() as transaction:
        await LedgerStore(transaction).mark_dirty(wrong)
    assert await rollups.wrong_hours(since=NOON, until=NOON + timedelta(hours=3)) == []
    await rollups.make_all()
    await _check(database)
    async with database.writing() as transaction:
        await transaction.execute(delete(RollupRow).where(RollupRow.period == RollupPeriod.DAY))
    assert await rollups.wrong_hours(since=NOON, until=NOON + timedelta(hours=3)) == [
        NOON.replace(hour=0)
    ]
