"""Pages and files of usage that customers and operators have in common.

The caller restricts `wanted` to what the visitor may see.
"""

from typing import Any, Final, cast

from fastapi import Request, Response

from gateway.console.rendering import page
from gateway.console.usage_query import UsageQuery, requests_csv
from gateway.http.context import ProcessContext
from gateway.management.usage.pages import report_page, requests_page
from gateway.management.usage.parts import Dimension, UsageFilter
from gateway.management.usage.periods import Bucket
from gateway.management.usage.query import BucketsQuery, PageQuery
from gateway.management.usage.schemas import receipt_fields
from gateway.management.usage.service import UsageService

ROWS: Final = 50
_CSV_SUMS: Final = 10_000


async def sums_file(
    context: ProcessContext,
    query: UsageQuery,
    wanted: UsageFilter,
    dimensions: tuple[Dimension, ...],
) -> Response:
    """Return the sums of each day and each value of the dimensions as CSV."""
    found = await report_page(
        UsageService(context.database),
        wanted,
        BucketsQuery(query.span, Bucket.DAY),
        dimensions=dimensions,
        page=PageQuery(query.after, _CSV_SUMS, as_csv=True),
    )
    response = cast("Response", found)
    response.headers["content-disposition"] = 'attachment; filename="usage.csv"'
    return response


async def requests_list(
    request: Request, context: ProcessContext, query: UsageQuery, wanted: UsageFilter
) -> Response:
    """List single requests, newest first."""
    found = await requests_page(
        UsageService(context.database),
        wanted,
        query.span,
        page=PageQuery(query.after, ROWS, as_csv=False),
    )
    fields = cast("dict[str, Any]", found)
    following = fields["next"]
    return page(
        request,
        "requests.html",
        query=query,
        receipts=fields["data"],
        following=following and query.link("/console/requests", after=following),
    )


def requests_file(context: ProcessContext, query: UsageQuery, wanted: UsageFilter) -> Response:
    """Return all requests of a period as CSV, newest first."""
    return requests_csv(UsageService(context.database), wanted, query.span, name="requests")


async def receipt_of(
    request: Request, context: ProcessContext, wanted: UsageFilter, request_id: str
) -> Response:
    """Show the receipt of one request."""
    record = await UsageService(context.database).request(wanted, request_id)
    return page(request, "receipt.html", record=record, receipt=receipt_fields(record))
