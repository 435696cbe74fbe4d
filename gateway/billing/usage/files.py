"""Reports and requests of a period as a whole CSV file, which is read page by page.

Each page has its own transaction: a slow client holds no connection of the database.
"""

from collections.abc import AsyncIterator, Iterable, Sequence
from functools import partial

from fastapi.responses import Response

from gateway.billing.usage.pages import USAGE_COLUMNS, columns_of, usage_row, writer_of
from gateway.billing.usage.parts import UsageFilter
from gateway.billing.usage.periods import Span
from gateway.billing.usage.query import MAX_USAGE_PAGE
from gateway.billing.usage.schemas import RECEIPT_COLUMNS, Cell, receipt_row, to_csv, usage_fields
from gateway.billing.usage.service import ReportRequest, UsageService, position
from gateway.http.connection import Stream
from gateway.platform.concurrency.fair_turns import LoopTurns
from gateway.platform.database.paging import PART

Rows = Iterable[list[Cell]]


def report_file(service: UsageService, turns: LoopTurns, asked: ReportRequest) -> Response:
    """Return all sums of a report."""
    columns = columns_of(USAGE_COLUMNS, asked.wanted)

    async def pages() -> AsyncIterator[Rows]:
        after, has_more = None, True
        while has_more:
            report = await service.report(asked, after=after, limit=MAX_USAGE_PAGE)
            yield (usage_row(usage_fields(each), columns) for each in report.slices)
            after, has_more = report.next, report.next is not None

    return _file("usage", turns, asked.wanted, asked.span, columns, pages())


def requests_file(
    service: UsageService, turns: LoopTurns, wanted: UsageFilter, span: Span
) -> Response:
    """Return all requests of a period, newest first."""
    columns = columns_of(RECEIPT_COLUMNS, wanted)

    async def pages() -> AsyncIterator[Rows]:
        before, has_more = None, True
        while has_more:
            found = await service.requests(wanted, span, before=before, limit=PART)
            yield (receipt_row(each, columns) for each in found.entries)
            has_more = found.has_more
            if has_more:
                before = position(found.entries[-1])

    return _file("requests", turns, wanted, span, columns, pages())


def _file(
    kind: str,
    turns: LoopTurns,
    wanted: UsageFilter,
    span: Span,
    columns: Sequence[str],
    pages: AsyncIterator[Rows],
) -> Response:
    """Return a file that is named by the tenant and the period."""
    write = writer_of(turns, wanted)

    async def content() -> AsyncIterator[str]:
        yield to_csv(columns, ())
        async for rows in pages:
            async for part in write(rows, partial(to_csv, None)):
                yield part

    name = f"{wanted.tenant_id or 'all'}-{kind}-{span.start:%Y-%m-%d}-{span.end:%Y-%m-%d}.csv"
    headers = {"content-disposition": f'attachment; filename="{name}"'}
    return Stream(content(), media_type="text/csv", headers=headers)
