"""Usage reports: sums by time, key, model and so on, and single requests."""

from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final, Literal, NamedTuple

from pydantic import BaseModel, Field
from sqlalchemy import (
    ColumnElement,
    Select,
    String,
    and_,
    desc,
    false,
    func,
    literal,
    literal_column,
    or_,
    select,
    tuple_,
    type_coerce,
    union_all,
)
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import InstrumentedAttribute

from contract.tier import ServiceTier
from gateway.billing.ledger.rollups import first_token_sums, request_sums
from gateway.billing.usage.parts import NOTHING, Dimension, UsageFilter, UsageSums
from gateway.billing.usage.periods import Bucket, Sources, Span, bucket_span, choose_sources
from gateway.platform.database.engine import Database
from gateway.platform.database.paging import PART, Page
from gateway.platform.database.tables import (
    FIRST_TOKENS,
    ApiKeyRow,
    DirtyHourRow,
    LedgerRow,
    RollupPeriod,
    RollupRow,
)
from gateway.records.errors import NotFoundError, shown
from gateway.records.times import hour_of, to_ms, to_time
from gateway.records.usage_record import Counts, UsageRecord, quantile_ms

Rows = type[LedgerRow] | type[RollupRow]
Time = InstrumentedAttribute[datetime]


COLUMNS: Final = {
    Dimension.TENANT: "tenant_id",
    Dimension.PROJECT: "project_id",
    Dimension.KEY: "credential_id",
    Dimension.MODEL: "model",
    Dimension.SERVICE_TIER: "service_tier",
}

_SQLITE_FORMAT: Final[Mapping[Bucket, ColumnElement[Any]]] = {
    Bucket.HOUR: literal_column("'%Y-%m-%dT%H'"),
    Bucket.DAY: literal_column("'%Y-%m-%d'"),
    Bucket.MONTH: literal_column("'%Y-%m'"),
}
_POSTGRESQL_FORMAT: Final[Mapping[Bucket, ColumnElement[Any]]] = {
    Bucket.HOUR: literal_column("""'YYYY-MM-DD"T"HH24'"""),
    Bucket.DAY: literal_column("'YYYY-MM-DD'"),
    Bucket.MONTH: literal_column("'YYYY-MM'"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportRequest:
    """The requested report."""

    wanted: UsageFilter
    span: Span
    bucket: Bucket
    dimensions: tuple[Dimension, ...] = ()
    """Dimensions to group by, in this order."""
    only: Mapping[Dimension, Sequence[str]] = field(default_factory=dict)
    """Only these values of some dimensions."""


@dataclass(frozen=True, slots=True)
class UsageSlice:
    """The sums of one bucket and one value of each dimension."""

    span: Span
    values: Mapping[Dimension, str]
    sums: UsageSums


@dataclass(frozen=True, slots=True)
class UsageReport:
    """A page of a report, sorted by time and then by the dimensions."""

    slices: list[UsageSlice]
    next: tuple[str, ...] | None
    """Position after which the next page starts; None on the last page."""


class _Source(NamedTuple):
    """Rows to sum."""

    table: Rows
    time: Any
    """Column of the start time."""
    condition: ColumnElement[bool]
    sums: dict[str, ColumnElement[Any]]
    first_tokens: dict[str, ColumnElement[Any]]
    """Requests by their time to the first token."""
    bucket: Bucket | None = None
    """The period of each sum."""


def _sources(chosen: Sources) -> list[_Source]:
    days, hours = (
        _Source(
            RollupRow,
            RollupRow.start_at,
            and_(RollupRow.period == period, _within(RollupRow.start_at, spans)),
            _ROLLUP_SUMS,
            _ROLLUP_FIRST_TOKENS,
            bucket,
        )
        for period, bucket, spans in (
            (RollupPeriod.DAY, Bucket.DAY, chosen.days),
            (RollupPeriod.HOUR, Bucket.HOUR, chosen.hours),
        )
    )
    rows = _Source(
        LedgerRow,
        LedgerRow.created_at,
        _within(LedgerRow.created_at, chosen.rows),
        _ROW_SUMS,
        _ROW_FIRST_TOKENS,
    )
    return [days, hours, rows]


_ROLLUP_SUMS: Final[dict[str, ColumnElement[Any]]] = {
    name: func.sum(getattr(RollupRow, name)) for name in UsageSums._fields
}
_ROLLUP_FIRST_TOKENS: Final[dict[str, ColumnElement[Any]]] = {
    name: func.sum(RollupRow.__table__.c[name]).label(name) for name in FIRST_TOKENS
}


def _row_sums() -> dict[str, ColumnElement[Any]]:
    counted = (*Counts._fields, "cost_micros")
    return request_sums() | {name: func.sum(getattr(LedgerRow, name)) for name in counted}


# Made once: the expressions of a report take longer to make than the database needs.
_ROW_SUMS: Final = _row_sums()
_ROW_FIRST_TOKENS: Final = first_token_sums(LedgerRow.first_token_ms)


def _within(time: Time, spans: Iterable[Span]) -> ColumnElement[bool]:
    return or_(false(), *(and_(time >= span.start, time < span.end) for span in spans))


def _text(table: Rows, name: str) -> ColumnElement[str]:
    return func.coalesce(
        type_coerce(getattr(table, name), String), literal_column("''"), type_=String
    )


def _conditions(table: Rows, wanted: UsageFilter) -> list[ColumnElement[bool]]:
    asked = {
        table.tenant_id: wanted.tenant_id,
        table.project_id: wanted.project_id,
        table.credential_id: wanted.credential_id,
        table.model: wanted.model,
        table.service_tier: wanted.service_tier,
    }
    return [column == value for column, value in asked.items() if value is not None]


async def dirty_hours(transaction: AsyncSession, span: Span) -> set[datetime]:
    """Return the hours whose sums may lag the ledger."""
    hour = DirtyHourRow.hour
    found = await transaction.scalars(
        select(hour).where(hour >= hour_of(span.start), hour < span.end).distinct()
    )
    return set(found)


def _sums(
    transaction: AsyncSession, asked: ReportRequest, sources: Iterable[_Source]
) -> tuple[Sequence[ColumnElement[Any]], Select[Any]]:
    """Return the groups of a report, and the query of their sums."""
    is_postgresql = transaction.get_bind().dialect.name == "postgresql"
    names = [COLUMNS[dimension] for dimension in asked.dimensions]
    parts = union_all(
        *(
            _part(source, asked.bucket, names, is_postgresql=is_postgresql).where(
                *_conditions(source.table, asked.wanted),
                *(
                    _text(source.table, COLUMNS[dimension]).in_(values)
                    for dimension, values in asked.only.items()
                ),
            )
            for source in sources
        )
    ).subquery()
    groups = [parts.c.label, *(parts.c[name] for name in names)]
    # Without groups, a sum over no rows is a row of nulls.
    query = select(
        *groups, *(func.sum(parts.c[name]).label(f"all_{name}") for name in UsageSums._fields)
    ).where(parts.c.cost_micros.is_not(None))
    return groups, query.group_by(*groups)


def _part(source: _Source, bucket: Bucket, names: Sequence[str], *, is_postgresql: bool) -> Any:
    # Constants are part of the SQL text, so that PostgreSQL sees that both places are equal.
    groups = [_text(source.table, name).label(name) for name in names]
    if bucket is Bucket.TOTAL:
        label: ColumnElement[str] = literal_column("''", String)
    else:
        label = _label(source.time, bucket, is_postgresql=is_postgresql)
        # A text for each group of times, not for each sum.
        has_many = source.bucket is None or bucket is Bucket.MONTH
        groups.append(label.label("label") if has_many else source.time)
    sums = [source.sums[name].label(name) for name in UsageSums._fields]
    columns = [label.label("label"), *groups[: len(names)], *sums]
    return select(*columns).where(source.condition).group_by(*groups)


def _label(time: Any, bucket: Bucket, *, is_postgresql: bool) -> ColumnElement[str]:
    if is_postgresql:
        utc = func.timezone(literal_column("'UTC'"), time)
        return func.to_char(utc, _POSTGRESQL_FORMAT[bucket], type_=String)
    return func.strftime(_SQLITE_FORMAT[bucket], time, type_=String)


_NAMES: Final = tuple(
    name for name in UsageRecord.__struct_fields__ if name in LedgerRow.__table__.c
)
_RECORD: Final = [LedgerRow.__table__.c[name] for name in ("created_at", "ended_at", *_NAMES)]
"""Columns instead of rows of the ORM, which take three times as long."""


def _record(row: Sequence[Any]) -> UsageRecord:
    created_at, ended_at, *values = row
    columns = dict(zip(_NAMES, values, strict=True))
    return UsageRecord(**columns, created_ms=to_ms(created_at), ended_ms=to_ms(ended_at))


async def _records(
    transaction: AsyncSession,
    wanted: UsageFilter,
    span: Span,
    *,
    edge: tuple[datetime, str] | None,
    limit: int,
    is_newer: bool = False,
) -> list[UsageRecord]:
    """Return single requests, newest first: those just before an edge, or just after it."""
    order = LedgerRow.created_at, LedgerRow.request_id
    query = select(*_RECORD).where(
        *_conditions(LedgerRow, wanted),
        LedgerRow.created_at >= span.start,
        LedgerRow.created_at < span.end,
    )
    if wanted.outcomes:
        query = query.where(LedgerRow.outcome.in_(wanted.outcomes))
    if edge is not None:
        place, limits = tuple_(*order), tuple_(*edge)
        query = query.where(place > limits if is_newer else place < limits)
    order_by = order if is_newer else map(desc, order)
    rows = await transaction.execute(query.order_by(*order_by).limit(limit))
    records = [_record(row) for row in rows]
    return records[::-1] if is_newer else records


class LatencyBody(BaseModel):
    """Time from the admission to the first token."""

    object: Literal["usage.latency"] = "usage.latency"
    requests: int = Field(description="Requests that had a first token.")
    p50_ms: int | None
    p99_ms: int | None


class UsageService:
    """Usage and cost, by the ledger."""

    def __init__(self, database: Database) -> None:
        self._database = database

    @asynccontextmanager
    async def _snapshot(
        self, span: Span, *, by_hour: bool = False
    ) -> AsyncIterator[tuple[AsyncSession, list[_Source]]]:
        """Open a transaction that sees one state, and choose the sources of sums of a period."""
        async with self._database.snapshot() as transaction:
            dirty = await dirty_hours(transaction, span)
            yield transaction, _sources(choose_sources(span, dirty, by_hour=by_hour))

    async def report(
        self, asked: ReportRequest, *, after: Sequence[str] | None, limit: int
    ) -> UsageReport:
        """Return sums that equal those over the ledger's rows at this moment.

        They are sorted by bucket and dimensions, and start after a given group.
        """
        is_by_hour = asked.bucket is Bucket.HOUR
        async with self._snapshot(asked.span, by_hour=is_by_hour) as (transaction, sources):
            groups, query = _sums(transaction, asked, sources)
            if after is not None:
                query = query.where(tuple_(*groups) > tuple_(*map(literal, after)))
            found = await transaction.stream(query.order_by(*groups).limit(limit + 1))
            slices: list[UsageSlice] = []
            last = following = None
            async for part in found.partitions(PART):
                for row in part:
                    if len(slices) == limit:
                        following = last
                        break
                    last = tuple(row[: len(groups)])
                    slices.append(
                        UsageSlice(
                            bucket_span(asked.bucket, last[0], asked.span),
                            dict(zip(asked.dimensions, last[1:], strict=True)),
                            UsageSums(*map(int, row[len(groups) :])),
                        )
                    )
        return UsageReport(slices, following)

    async def total(self, wanted: UsageFilter, span: Span) -> UsageSums:
        """Return the sums of a period."""
        asked = ReportRequest(wanted=wanted, span=span, bucket=Bucket.TOTAL)
        report = await self.report(asked, after=None, limit=1)
        return report.slices[0].sums if report.slices else NOTHING

    async def of_keys(
        self, wanted: UsageFilter, span: Span, key_ids: Sequence[str]
    ) -> dict[str, UsageSums]:
        """Return the sums of those of these keys that sent requests."""
        by_key = ReportRequest(
            wanted=wanted,
            span=span,
            bucket=Bucket.TOTAL,
            dimensions=(Dimension.KEY,),
            only={Dimension.KEY: key_ids},
        )
        report = await self.report(by_key, after=None, limit=len(key_ids))
        return {each.values[Dimension.KEY]: each.sums for each in report.slices}

    async def last_used(self, key_ids: Collection[str]) -> dict[str, datetime | None]:
        """Return when the newest request of each of these keys was admitted."""
        # For each key a query of its own, which reads one entry of the index.
        newest = select(func.max(LedgerRow.created_at))
        newest = newest.where(LedgerRow.credential_id == ApiKeyRow.id)
        asked = select(ApiKeyRow.id, newest.scalar_subquery()).where(ApiKeyRow.id.in_(key_ids))
        async with self._database.reading() as transaction:
            return dict((await transaction.execute(asked)).all())

    async def largest(self, asked: ReportRequest, *, count: int) -> list[UsageSlice]:
        """Return the sums of the `count` values of a dimension that cost the most, by bucket.

        The slices without a value have the sums of all others.
        """
        is_by_hour = asked.bucket is Bucket.HOUR
        async with self._snapshot(asked.span, by_hour=is_by_hour) as (transaction, sources):
            _, query = _sums(transaction, asked, sources)
            sums, (dimension,) = query.cte(), asked.dimensions
            label, value = sums.c.label, sums.c[COLUMNS[dimension]]
            cost = func.sum(sums.c.all_cost_micros)
            largest = select(value).group_by(value).order_by(desc(cost), value).limit(count)
            first = largest.subquery()
            [shown] = first.c
            columns = (func.sum(sums.c[f"all_{name}"]) for name in UsageSums._fields)
            found = await transaction.execute(
                select(label, shown, *columns)
                .select_from(sums.outerjoin(first, value == shown))
                .group_by(label, shown)
            )
        return [
            UsageSlice(
                bucket_span(asked.bucket, start, asked.span),
                {} if name is None else {dimension: name},
                UsageSums(*map(int, numbers)),
            )
            for start, name, *numbers in found
        ]

    async def requests(
        self,
        wanted: UsageFilter,
        span: Span,
        *,
        before: tuple[datetime, str] | None,
        limit: int,
    ) -> Page[UsageRecord]:
        """Return single requests, newest first; `before` is the last one of the previous page."""
        records: list[UsageRecord] = []
        async with self._database.reading() as transaction:
            while (missing := min(limit + 1 - len(records), PART)) > 0:
                part = await _records(transaction, wanted, span, edge=before, limit=missing)
                records += part
                if len(part) < missing:
                    break
                before = position(part[-1])
        return Page(records[:limit], len(records) > limit)

    async def newer_requests(
        self, wanted: UsageFilter, span: Span, *, after: tuple[datetime, str], limit: int
    ) -> Page[UsageRecord]:
        """Return the requests that are newer than one, newest first, at most PART."""
        async with self._database.reading() as transaction:
            records = await _records(
                transaction, wanted, span, edge=after, limit=limit + 1, is_newer=True
            )
        return Page(records[-limit:], len(records) > limit)

    async def latency(self, wanted: UsageFilter, span: Span) -> LatencyBody:
        """Return the time to the first token, without lines of batches."""
        counts = await self._first_tokens(wanted, span)
        p50_ms, p99_ms = (quantile_ms(counts, percent) for percent in (50, 99))
        return LatencyBody(requests=sum(counts), p50_ms=p50_ms, p99_ms=p99_ms)

    async def first_token_ms(self, wanted: UsageFilter, span: Span) -> int | None:
        """Return the 95th percentile of the time to the first token; None without requests."""
        return quantile_ms(await self._first_tokens(wanted, span), 95)

    async def _first_tokens(self, wanted: UsageFilter, span: Span) -> list[int]:
        """Return the requests in each bucket of `BOUNDS_MS`, without lines of batches."""
        async with self._snapshot(span) as (transaction, sources):
            parts = union_all(
                *(
                    select(*source.first_tokens.values()).where(
                        source.condition,
                        source.table.service_tier != ServiceTier.BATCH,
                        *_conditions(source.table, wanted),
                    )
                    for source in sources
                )
            ).subquery()
            found = await transaction.execute(
                select(*(func.sum(parts.c[name]) for name in FIRST_TOKENS))
            )
            return [int(requests or 0) for requests in found.one()]

    async def request(self, wanted: UsageFilter, request_id: str) -> UsageRecord:
        """Return one request. Raises NotFoundError, also if it belongs to somebody else."""
        is_it = LedgerRow.request_id == request_id
        asked = select(*_RECORD).where(*_conditions(LedgerRow, wanted), is_it)
        async with self._database.reading() as transaction:
            row = (await transaction.execute(asked)).one_or_none()
        if row is None:
            raise NotFoundError(f"There is no request {shown(request_id)} in the ledger.")
        return _record(row)


def position(record: UsageRecord) -> tuple[datetime, str]:
    """Return the sort position of a record among requests."""
    return to_time(record.created_ms), record.request_id
