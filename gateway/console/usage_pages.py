"""Pages and files of usage that customers and operators have in common.

The caller restricts `wanted` to what the visitor may see.
"""

from collections.abc import AsyncIterator, Iterable, Sequence
from functools import partial
from typing import Final

from fastapi import Request, Response

from gateway.billing.usage.pages import (
    USAGE_COLUMNS,
    Writer,
    columns_of,
    read_requests,
    usage_row,
    writer_of,
)
from gateway.billing.usage.parts import Dimension, UsageFilter
from gateway.billing.usage.periods import Bucket
from gateway.billing.usage.query import MAX_USAGE_PAGE
from gateway.billing.usage.schemas import (
    RECEIPT_COLUMNS,
    Cell,
    receipt_fields,
    receipt_row,
    to_csv,
    usage_fields,
)
from gateway.billing.usage.service import ReportRequest, UsageService, position
from gateway.console.rendering import page
from gateway.console.usage_query import UsageQuery
from gateway.http.connection import Stream
from gateway.http.services import Services
from gateway.platform.concurrency.fair_turns import LoopTurns
from gateway.platform.database.paging import PART

ROWS: Final = 50


def sums_file(
    services: Services,
    query: UsageQuery,
    wanted: UsageFilter,
    dimensions: tuple[Dimension, ...],
) -> Response:
    """Return the sums of each day and each value of the dimensions as CSV."""
    service, columns = services.make(UsageService), columns_of(USAGE_COLUMNS, wanted)
    asked = ReportRequest(wanted=wanted, span=query.span, bucket=Bucket.DAY, dimensions=dimensions)

    async def rows() -> AsyncIterator[Iterable[list[Cell]]]:
        after, has_more = None, True
        while has_more:
            report = await service.report(asked, after=after, limit=MAX_USAGE_PAGE)
            yield (usage_row(usage_fields(each), columns) for each in report.slices)
            after, has_more = report.next, report.next is not None

    return _csv_file("usage", writer_of(services[LoopTurns], wanted), columns, rows())


async def requests_list(
    request: Request, services: Services, query: UsageQuery, wanted: UsageFilter
) -> Response:
    """List single requests, newest first."""
    found, following = await read_requests(
        services.make(UsageService), wanted, query.span, after=query.after, limit=ROWS
    )
    return page(
        request,
        "requests.html",
        query=query,
        receipts=map(receipt_fields, found),
        following=following and query.link("/console/requests", after=following),
    )


def requests_file(services: Services, query: UsageQuery, wanted: UsageFilter) -> Response:
    """Return all requests of a period as CSV, newest first."""
    service, columns = services.make(UsageService), columns_of(RECEIPT_COLUMNS, wanted)

    async def rows() -> AsyncIterator[Iterable[list[Cell]]]:
        before, has_more = None, True
        while has_more:
            found = await service.requests(wanted, query.span, before=before, limit=PART)
            yield (receipt_row(each, columns) for each in found.entries)
            has_more = found.has_more
            if has_more:
                before = position(found.entries[-1])

    return _csv_file("requests", writer_of(services[LoopTurns], wanted), columns, rows())


def _csv_file(
    name: str, write: Writer, columns: Sequence[str], pages: AsyncIterator[Iterable[list[Cell]]]
) -> Response:
    """Return a CSV file that is read page by page.

    Each page has its own transaction: a slow client holds no connection of the database.
    """

    async def content() -> AsyncIterator[str]:
        yield to_csv(columns, ())
        async for rows in pages:
            async for part in write(rows, partial(to_csv, None)):
                yield part

    headers = {"content-disposition": f'attachment; filename="{name}.csv"'}
    return Stream(content(), media_type="text/csv", headers=headers)


async def receipt_of(
    request: Request, services: Services, wanted: UsageFilter, request_id: str
) -> Response:
    """Show the receipt of one request."""
    record = await services.make(UsageService).request(wanted, request_id)
    return page(request, "receipt.html", record=record, receipt=receipt_fields(record))
