"""Rollups: hourly and daily sums of the ledger, derived from rows and never corrected."""

from collections.abc import Collection, Iterable, Mapping
from datetime import datetime, timedelta
from typing import Any, Final

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Select,
    case,
    cast,
    delete,
    func,
    insert,
    literal,
    literal_column,
    select,
    text,
)
from sqlalchemy.ext.asyncio import AsyncSession

from gateway.database.engine import Database
from gateway.database.ledger.rows import day_of
from gateway.database.ledger.snapshot import snapshot
from gateway.database.tables import (
    FAILED_OUTCOMES,
    DirtyHourRow,
    LedgerRow,
    RollupPeriod,
    RollupRow,
)

ROLLUP_LOCK: Final = 7_585_426
"""PostgreSQL advisory lock for the summation: two processes at once would write the same rows."""
MARKS: Final = 5_000
"""Marks that one transaction processes."""
HOUR: Final = timedelta(hours=1)
DAY: Final = timedelta(days=1)

_KEY = ("tenant_id", "project_id", "credential_id", "model", "service_tier")
_SUMS = (
    "requests",
    "failed_requests",
    "prompt_tokens",
    "cached_tokens",
    "completion_tokens",
    "cost_micros",
)

Sums = Mapping[tuple[str, ...], tuple[int, ...]]
"""Tenant, project, credential, model and tier -> the numbers of a `RollupRow`."""


class Rollups:
    """Computes the sums of marked hours and their days, and finds wrong sums."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def make_all(self) -> int:
        """Compute the sums of all marked hours. Return the number of hours."""
        made = 0
        while hours := await self._make_some():
            made += hours
        return made

    async def wrong_hours(self, *, since: datetime, until: datetime) -> list[datetime]:
        """Return the unmarked hours whose sums differ from their rows.

        If the sums of a day differ from those of its hours, the day's first hour is returned.
        """
        wrong: set[datetime] = set()
        day = day_of(since)
        while day < until:
            async with snapshot(self._database) as transaction:
                wrong |= await _wrong_hours_of(transaction, day)
            day += DAY
        return sorted(wrong)

    async def _make_some(self) -> int:
        async with self._database.writing() as transaction:
            if transaction.get_bind().dialect.name == "postgresql":
                await transaction.execute(
                    text("SELECT pg_advisory_xact_lock(:key)"), {"key": ROLLUP_LOCK}
                )
            # Every later query sees at least the rows whose marks this query sees.
            marks = await transaction.execute(
                select(DirtyHourRow.id, DirtyHourRow.hour).order_by(DirtyHourRow.id).limit(MARKS)
            )
            found = [(id_, hour) for id_, hour in marks]
            hours = {hour for _, hour in found}
            for hour in sorted(hours):
                await _replace(transaction, RollupPeriod.HOUR, hour, _sums_of_rows(hour))
            for day in sorted({day_of(hour) for hour in hours}):
                await _replace(transaction, RollupPeriod.DAY, day, _sums_of_hours(day))
            await _remove_marks(transaction, [id_ for id_, _ in found])
        return len(hours)


async def _replace(
    transaction: AsyncSession, period: RollupPeriod, start: datetime, sums: Select[Any]
) -> None:
    await transaction.execute(
        delete(RollupRow).where(RollupRow.period == period, RollupRow.start_at == start)
    )
    columns = RollupRow.__table__.c
    rows = sums.add_columns(
        literal(period, columns.period.type), literal(start, columns.start_at.type)
    )
    await transaction.execute(
        insert(RollupRow).from_select([*_KEY, *_SUMS, "period", "start_at"], rows)
    )


async def _remove_marks(transaction: AsyncSession, marks: Collection[int]) -> None:
    await transaction.execute(delete(DirtyHourRow).where(DirtyHourRow.id.in_(marks)))


def _sums_of_rows(hour: datetime) -> Select[Any]:
    columns = LedgerRow.__table__.c
    # A literal, since PostgreSQL cannot see that two parameters have the same value.
    project = func.coalesce(columns.project_id, literal_column("''"))
    key = [project if name == "project_id" else columns[name] for name in _KEY]
    counts = {
        "requests": func.count(),
        "failed_requests": _sum(case((columns.outcome.in_(FAILED_OUTCOMES), 1), else_=0)),
    }
    return (
        select(*key, *(counts[name] if name in counts else _sum(columns[name]) for name in _SUMS))
        .where(LedgerRow.created_at >= hour, LedgerRow.created_at < hour + HOUR)
        .group_by(*key)
    )


def _sums_of_hours(day: datetime) -> Select[Any]:
    columns = RollupRow.__table__.c
    key = [columns[name] for name in _KEY]
    return (
        select(*key, *(_sum(columns[name]) for name in _SUMS))
        .where(
            RollupRow.period == RollupPeriod.HOUR,
            RollupRow.start_at >= day,
            RollupRow.start_at < day + DAY,
        )
        .group_by(*key)
    )


def _kept_sums(period: RollupPeriod, start: datetime) -> Select[Any]:
    columns = RollupRow.__table__.c
    return select(*(columns[name] for name in (*_KEY, *_SUMS))).where(
        RollupRow.period == period, RollupRow.start_at == start
    )


def _sum(column: Any) -> ColumnElement[int]:
    # PostgreSQL sums bigint values into numeric.
    return cast(func.sum(column), BigInteger)


async def _wrong_hours_of(transaction: AsyncSession, day: datetime) -> set[datetime]:
    marks = await transaction.scalars(
        select(DirtyHourRow.hour).where(DirtyHourRow.hour >= day, DirtyHourRow.hour < day + DAY)
    )
    marked = set(marks)
    wrong = set()
    for hour in (day + number * HOUR for number in range(24)):
        if hour not in marked and await _differ(
            transaction, _sums_of_rows(hour), _kept_sums(RollupPeriod.HOUR, hour)
        ):
            wrong.add(hour)
    if not (wrong or marked) and await _differ(
        transaction, _sums_of_hours(day), _kept_sums(RollupPeriod.DAY, day)
    ):
        wrong.add(day)
    return wrong


async def _differ(transaction: AsyncSession, one: Select[Any], other: Select[Any]) -> bool:
    return _read(await transaction.execute(one)) != _read(await transaction.execute(other))


def _read(rows: Iterable[Any]) -> Sums:
    width = len(_KEY)
    return {tuple(row[:width]): tuple(row[width:]) for row in rows}
