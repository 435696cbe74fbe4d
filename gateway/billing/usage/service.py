"""Usage reports: sums by time, key, model and so on, and single requests."""

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Self

from sqlalchemy.ext.asyncio import AsyncSession

from gateway.billing.usage.parts import Dimension, UsageFilter, UsageGroup, UsageSums
from gateway.billing.usage.periods import Bucket, Span, bucket_span, choose_sources
from gateway.billing.usage.store import UsageStore
from gateway.platform.database.engine import Database
from gateway.platform.database.paging import PART, Page
from gateway.records.errors import NotFoundError, shown
from gateway.records.first_tokens import quantile_ms
from gateway.records.times import to_time
from gateway.records.usage_record import UsageRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportRequest:
    """The requested report."""

    wanted: UsageFilter
    span: Span
    bucket: Bucket
    dimensions: tuple[Dimension, ...] = ()
    """Dimensions to group by, in this order."""


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


@dataclass(frozen=True, slots=True)
class Latency:
    """Time from the admission to the first token; None without requests that had one."""

    requests: int
    p50_ms: int | None
    p99_ms: int | None

    @classmethod
    def of(cls, first_tokens: Sequence[int]) -> Self:
        """Return the latency of requests, given by their numbers in each bucket."""
        return cls(sum(first_tokens), quantile_ms(first_tokens, 50), quantile_ms(first_tokens, 99))


class UsageService:
    """Usage and cost, by the ledger."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def report(
        self, asked: ReportRequest, *, after: Sequence[str] | None, limit: int
    ) -> UsageReport:
        """Return sums that equal those over the ledger's rows at this moment."""
        by_hour = asked.bucket is Bucket.HOUR
        async with self._database.snapshot() as transaction:
            store = UsageStore(transaction)
            dirty = await store.dirty_hours(asked.span)
            groups = await store.groups(
                asked.wanted,
                choose_sources(asked.span, dirty, by_hour=by_hour),
                bucket=asked.bucket,
                dimensions=asked.dimensions,
                after=after,
                limit=limit + 1,
            )
        shown_groups = groups[:limit]
        last = shown_groups[-1] if len(groups) > limit else None
        return UsageReport(
            [_slice(asked, group) for group in shown_groups],
            None if last is None else (last.label, *last.values),
        )

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
            async for part in _parts(transaction, wanted, span, before=before, limit=limit + 1):
                records += part
        return Page(records[:limit], len(records) > limit)

    async def latency(self, wanted: UsageFilter, span: Span) -> Latency:
        """Return the time to the first token, without lines of batches."""
        async with self._database.snapshot() as transaction:
            store = UsageStore(transaction)
            dirty = await store.dirty_hours(span)
            sources = choose_sources(span, dirty, by_hour=False)
            return Latency.of(await store.first_tokens(wanted, sources))

    async def request(self, wanted: UsageFilter, request_id: str) -> UsageRecord:
        """Return one request. Raises NotFoundError, also if it belongs to somebody else."""
        async with self._database.reading() as transaction:
            record = await UsageStore(transaction).record(wanted, request_id)
        if record is None:
            raise NotFoundError(f"There is no request {shown(request_id)} in the ledger.")
        return record


async def _parts(
    transaction: AsyncSession,
    wanted: UsageFilter,
    span: Span,
    *,
    before: tuple[datetime, str] | None,
    limit: int,
) -> AsyncIterator[list[UsageRecord]]:
    while limit > 0 and (
        part := await UsageStore(transaction).records(
            wanted, span, before=before, limit=min(limit, PART)
        )
    ):
        yield part
        limit -= len(part) if len(part) == PART else limit
        before = position(part[-1])


def position(record: UsageRecord) -> tuple[datetime, str]:
    """Return the sort position of a record among requests."""
    return to_time(record.created_ms), record.request_id


def _slice(asked: ReportRequest, group: UsageGroup) -> UsageSlice:
    return UsageSlice(
        bucket_span(asked.bucket, group.label, asked.span),
        dict(zip(asked.dimensions, group.values, strict=True)),
        group.sums,
    )
