"""Rollups: hourly and daily sums of the ledger, derived from rows and never corrected."""

import math
import operator
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from functools import cache, reduce
from random import SystemRandom
from typing import Any, Final, NamedTuple

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Insert,
    Select,
    and_,
    bindparam,
    case,
    cast,
    delete,
    func,
    insert,
    literal,
    literal_column,
    or_,
    select,
)
from sqlalchemy.ext.asyncio import AsyncSession

from common.tasks import each_apart
from contract.tier import ServiceTier
from gateway.platform.database.claims import lock_kind
from gateway.platform.database.engine import Database
from gateway.platform.database.tables import (
    FAILED_OUTCOMES,
    FIRST_TOKENS,
    IS_FIRST,
    AdapterRow,
    DirtyHourRow,
    LedgerRow,
    RollupPeriod,
    RollupRow,
    ServiceRollupRow,
)
from gateway.records.adapters import SEPARATOR
from gateway.records.errors import codes_of_clients
from gateway.records.times import day_of
from gateway.records.usage_record import BOUNDS_MS, Counts, Outcome

ROLLUP_LOCK: Final = 7_585_426
"""PostgreSQL advisory lock for the summation: two processes at once would write the same rows."""
MARKS: Final = 5_000
"""Marks of an hour that one transaction processes."""
LEAST_TENANTS: Final = 5
"""Tenants that must have a first token in an hour for its times to describe the service."""
LEAST_FIRST_TOKENS: Final = 50
TENANT_WEIGHT: Final = 10_000
"""What the first tokens of one tenant in one hour count together in the sums of the service."""
HOUR: Final = timedelta(hours=1)
DAY: Final = timedelta(days=1)

_random: Final = SystemRandom()
_START: Final = bindparam("start", type_=LedgerRow.created_at.type)
_END: Final = bindparam("end", type_=LedgerRow.created_at.type)
_CLIENT_CODES: Final = sorted(codes_of_clients())

Sums = Mapping[tuple[str, ...], tuple[int, ...]]
"""The key of a sum -> its numbers."""


class _Kind(NamedTuple):
    """A table of sums."""

    table: type[RollupRow] | type[ServiceRollupRow]
    key: tuple[str, ...]
    sums: tuple[str, ...]
    of_rows: Callable[[], Select[Any]]
    """Returns the query for the key and the sums of ledger rows from `start` to before `end`."""


class Rollups:
    """Computes the sums of marked hours and their days, and finds wrong sums."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def make_all(self, *, seconds: float = math.inf) -> int:
        """Compute the sums of marked hours until none is left or `seconds` are over.

        Return the number of hours. One hour's failure, which is raised at the end, delays no other
        hour: in a random order, one that takes all the time is not always the first.
        """
        deadline, made = time.monotonic() + seconds, list[datetime]()

        async def make(hour: datetime) -> None:
            if time.monotonic() < deadline and await self._make(hour):
                made.append(hour)

        while time.monotonic() < deadline and (hours := await self._marked_hours()):
            await each_apart(make, _random.sample(hours, len(hours)), at_once=1)
        return len(made)

    async def wrong_hours(self, *, since: datetime, until: datetime) -> list[datetime]:
        """Return the unmarked hours whose sums differ from their rows.

        If the sums of a day differ from those of its hours, the day's first hour is returned.
        """
        wrong: set[datetime] = set()
        day = day_of(since)
        while day < until:
            async with self._database.snapshot() as transaction:
                wrong |= await _wrong_hours_of(transaction, day)
            day += DAY
        return sorted(wrong)

    async def _marked_hours(self) -> Sequence[datetime]:
        async with self._database.reading() as transaction:
            hours = select(DirtyHourRow.hour).distinct().order_by(DirtyHourRow.hour)
            return (await transaction.scalars(hours)).all()

    async def _make(self, hour: datetime) -> bool:
        """Compute the sums of an hour and its day, unless another process has done it."""
        async with self._database.writing() as transaction:
            await lock_kind(transaction, ROLLUP_LOCK)
            # Every later query sees at least the rows whose marks this query sees.
            marks = await transaction.scalars(
                select(DirtyHourRow.id).where(DirtyHourRow.hour == hour).limit(MARKS)
            )
            if not (found := marks.all()):
                return False
            for kind in _KINDS:
                await _replace(transaction, kind, RollupPeriod.HOUR, hour)
                await _replace(transaction, kind, RollupPeriod.DAY, day_of(hour))
            await _remove_marks(transaction, found)
        return True


def request_sums() -> dict[str, ColumnElement[int]]:
    """Return the sums of ledger rows that count requests."""
    has_failed = and_(IS_FIRST, LedgerRow.outcome.in_(FAILED_OUTCOMES))
    return {
        "requests": func.count(case((IS_FIRST, 1))),
        "failed_requests": func.count(case((has_failed, 1))),
    }


def first_token_sums(time: Any) -> dict[str, ColumnElement[Any]]:
    """Return the columns of `FIRST_TOKENS` for rows with this time to the first token."""
    buckets = zip(FIRST_TOKENS, (0, *BOUNDS_MS), (*BOUNDS_MS, None), strict=True)
    sums: dict[str, ColumnElement[Any]] = {}
    for name, low, high in buckets:
        is_within = time > low if high is None else and_(time > low, time <= high)
        sums[name] = func.sum(case((is_within, 1))).label(name)
    return sums


async def _replace(
    transaction: AsyncSession, kind: _Kind, period: RollupPeriod, start: datetime
) -> None:
    table = kind.table
    await transaction.execute(delete(table).where(table.period == period, table.start_at == start))
    await transaction.execute(_insertion(kind, period), _span(period, start))


async def _remove_marks(transaction: AsyncSession, marks: Collection[int]) -> None:
    await transaction.execute(delete(DirtyHourRow).where(DirtyHourRow.id.in_(marks)))


def _usage_of_rows() -> Select[Any]:
    columns = LedgerRow.__table__.c
    # A literal, since PostgreSQL cannot see that two parameters have the same value.
    project = func.coalesce(columns.project_id, literal_column("''"))
    key = [project if name == "project_id" else columns[name] for name in _USAGE.key]
    counts = request_sums() | first_token_sums(columns.first_token_ms)
    sums = (counts[name] if name in counts else _sum(columns[name]) for name in _USAGE.sums)
    return (
        select(*key, *sums)
        .where(LedgerRow.created_at >= _START, LedgerRow.created_at < _END)
        .group_by(*key)
    )


def _service_of_rows() -> Select[Any]:
    has_failed = or_(
        LedgerRow.outcome.in_((Outcome.LOST, Outcome.TIMED_OUT)),
        and_(LedgerRow.outcome == Outcome.FAILED, LedgerRow.code.not_in(_CLIENT_CODES)),
    )
    has_ended = or_(LedgerRow.outcome == Outcome.FINISHED, has_failed)
    counts = {
        "requests": case((and_(IS_FIRST, has_ended), 1)),
        "failed_requests": case((and_(IS_FIRST, has_failed), 1)),
    }
    rows = (
        select(
            LedgerRow.tenant_id,
            LedgerRow.model.label("full_model"),
            *(func.count(value).label(name) for name, value in counts.items()),
            *first_token_sums(LedgerRow.first_token_ms).values(),
        )
        .where(
            LedgerRow.created_at >= _START,
            LedgerRow.created_at < _END,
            LedgerRow.service_tier != ServiceTier.BATCH,
        )
        .group_by(LedgerRow.tenant_id, LedgerRow.model)
        .subquery()
    )
    full_name = AdapterRow.base_model + SEPARATOR + AdapterRow.name
    base = select(func.min(AdapterRow.base_model)).where(full_name == rows.c.full_model)
    model = func.coalesce(base.scalar_subquery(), rows.c.full_model).label("model")
    sums = [func.coalesce(_sum(rows.c[name]), 0).label(name) for name in _SERVICE.sums]
    parts = select(model, *sums).group_by(rows.c.tenant_id, model).subquery()
    number = reduce(operator.add, (parts.c[name] for name in FIRST_TOKENS))
    own = select(parts, func.nullif(number, 0).label("first_tokens")).subquery().c
    # Everybody sees these times: each tenant has the same weight, and none is there without others.
    is_shown = and_(
        func.count(own.first_tokens) >= LEAST_TENANTS,
        func.sum(own.first_tokens) >= LEAST_FIRST_TOKENS,
    )
    first_tokens = (
        case((is_shown, _sum((TENANT_WEIGHT * own[name]).op("/")(own.first_tokens))))
        for name in FIRST_TOKENS
    )
    requests = (_sum(own[name]) for name in ("requests", "failed_requests"))
    return select(own.model, *requests, *first_tokens).group_by(own.model)


_USAGE: Final = _Kind(
    RollupRow,
    ("tenant_id", "project_id", "credential_id", "model", "service_tier"),
    (
        "requests",
        "failed_requests",
        *Counts._fields,
        "cost_micros",
        *FIRST_TOKENS,
    ),
    _usage_of_rows,
)
_SERVICE: Final = _Kind(
    ServiceRollupRow, ("model",), ("requests", "failed_requests", *FIRST_TOKENS), _service_of_rows
)
_KINDS: Final = (_USAGE, _SERVICE)


# Each of these statements is built once: that takes longer than the database needs for an hour.


@cache
def _sums(kind: _Kind, period: RollupPeriod) -> Select[Any]:
    """Return the query for the key and the sums of an hour's rows, or of a day's hours."""
    if period is RollupPeriod.HOUR:
        return kind.of_rows()
    table, columns = kind.table, kind.table.__table__.c
    key = [columns[name] for name in kind.key]
    return (
        select(*key, *(_sum(columns[name]) for name in kind.sums))
        .where(table.period == RollupPeriod.HOUR, table.start_at >= _START, table.start_at < _END)
        .group_by(*key)
    )


@cache
def _kept_sums(kind: _Kind, period: RollupPeriod) -> Select[Any]:
    table, columns = kind.table, kind.table.__table__.c
    return select(*(columns[name] for name in (*kind.key, *kind.sums))).where(
        table.period == period, table.start_at == _START
    )


@cache
def _insertion(kind: _Kind, period: RollupPeriod) -> Insert:
    table: Any = kind.table.__table__
    rows = _sums(kind, period).add_columns(literal(period, table.c.period.type), _START)
    return insert(table).from_select([*kind.key, *kind.sums, "period", "start_at"], rows)


def _span(period: RollupPeriod, start: datetime) -> dict[str, datetime]:
    return {"start": start, "end": start + (HOUR if period is RollupPeriod.HOUR else DAY)}


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
        if hour in marked:
            continue
        for kind in _KINDS:
            if await _differ(transaction, kind, RollupPeriod.HOUR, hour):
                wrong.add(hour)
    if not (wrong or marked):
        for kind in _KINDS:
            if await _differ(transaction, kind, RollupPeriod.DAY, day):
                wrong.add(day)
    return wrong


async def _differ(
    transaction: AsyncSession, kind: _Kind, period: RollupPeriod, start: datetime
) -> bool:
    width, span = len(kind.key), _span(period, start)
    first = await transaction.execute(_sums(kind, period), span)
    second = await transaction.execute(_kept_sums(kind, period), span)
    return _read(first, width) != _read(second, width)


def _read(rows: Iterable[Any], width: int) -> Sums:
    return {tuple(row[:width]): tuple(row[width:]) for row in rows}
