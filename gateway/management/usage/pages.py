"""Pages of usage as JSON or CSV, for customers and operators."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from fastapi.responses import Response

from gateway.management.usage.csv_text import Cell, to_csv
from gateway.management.usage.export import RECEIPT_COLUMNS, receipt_row
from gateway.management.usage.parts import Dimension, UsageFilter
from gateway.management.usage.periods import Span
from gateway.management.usage.query import (
    BucketsQuery,
    PageQuery,
    bad_cursor,
    decode_cursor,
    encode_cursor,
)
from gateway.management.usage.schemas import receipt_fields, usage_fields
from gateway.management.usage.service import ReportRequest, UsageService, position
from gateway.tenancy.times import to_ms, to_time

NEXT_PAGE_HEADER: Final = "x-next-page"
MAX_CURSOR_MS: Final = 4 * 10**13
"""After the last year that a database supports."""

USAGE_COLUMNS: Final = (
    "start",
    "end",
    "tenant",
    "model",
    "key",
    "project",
    "service_tier",
    "requests",
    "failed_requests",
    "prompt_tokens",
    "cached_tokens",
    "completion_tokens",
    "cost_micros",
)


async def report_page(
    service: UsageService,
    wanted: UsageFilter,
    buckets: BucketsQuery,
    *,
    dimensions: tuple[Dimension, ...],
    page: PageQuery,
) -> Response | dict[str, Any]:
    """Return a page of a report as CSV, or as the members of its list."""
    asked = ReportRequest(
        wanted=wanted, span=buckets.span, bucket=buckets.bucket, dimensions=dimensions
    )
    after = decode_cursor(page.after, parts=1 + len(dimensions))
    report = await service.report(asked, after=after, limit=page.limit)
    following = None if report.next is None else encode_cursor(*report.next)
    data = [usage_fields(each) for each in report.slices]
    if page.as_csv:
        columns = _columns(USAGE_COLUMNS, wanted)
        return _csv(columns, ([each[name] for name in columns] for each in data), following)
    return {
        "start": asked.span.start,
        "end": asked.span.end,
        "bucket": asked.bucket,
        **_list(data, following),
    }


async def requests_page(
    service: UsageService, wanted: UsageFilter, span: Span, *, page: PageQuery
) -> Response | dict[str, Any]:
    """Return a page of requests as CSV, or as the members of its list."""
    found = await service.requests(
        wanted, span, before=_read_position(page.after), limit=page.limit
    )
    following = None
    if found.has_more:
        time, request_id = position(found.entries[-1])
        following = encode_cursor(str(to_ms(time)), request_id)
    if page.as_csv:
        columns = _columns(RECEIPT_COLUMNS, wanted)
        return _csv(columns, (receipt_row(each, columns) for each in found.entries), following)
    return _list([receipt_fields(each) for each in found.entries], following)


def _list(data: Sequence[Mapping[str, Any]], following: str | None) -> dict[str, Any]:
    return {"data": data, "has_more": following is not None, "next": following}


def _columns(names: Sequence[str], wanted: UsageFilter) -> list[str]:
    """Return the columns of a table; customers get no tenant column."""
    return [name for name in names if name != "tenant" or wanted.tenant_id is None]


def _csv(
    headings: Sequence[str], rows: Iterable[Sequence[Cell]], following: str | None
) -> Response:
    headers = {} if following is None else {NEXT_PAGE_HEADER: following}
    return Response(to_csv(headings, rows), media_type="text/csv", headers=headers)


def _read_position(after: str | None) -> tuple[datetime, str] | None:
    cursor = read_cursor(after)
    return None if cursor is None else (to_time(cursor[0]), cursor[1])


def read_cursor(after: str | None) -> tuple[int, str] | None:
    """Return the time, as Unix time in milliseconds, and the id at the end of a page of requests.

    Raises InvalidParameterError.
    """
    cursor = decode_cursor(after, parts=2)
    if cursor is None:
        return None
    time, request_id = cursor
    if not (time.isascii() and time.isdigit() and int(time) < MAX_CURSOR_MS):
        raise bad_cursor()
    return int(time), request_id
