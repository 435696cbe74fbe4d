"""Pages of usage as JSON or CSV, for customers and operators."""

from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any, Final

import msgspec
from fastapi.responses import Response
from msgspec.json import encode
from pydantic import BaseModel

from gateway.billing.usage.parts import Dimension, UsageFilter
from gateway.billing.usage.periods import Span
from gateway.billing.usage.query import (
    BucketsQuery,
    PageQuery,
    bad_cursor,
    decode_cursor,
    encode_cursor,
)
from gateway.billing.usage.schemas import (
    RECEIPT_COLUMNS,
    Cell,
    receipt_fields,
    receipt_row,
    to_csv,
    usage_fields,
)
from gateway.billing.usage.service import ReportRequest, UsageService, position
from gateway.platform.concurrency.fair_turns import LoopTurns
from gateway.platform.database.engine import Database
from gateway.records.times import to_ms, to_time
from gateway.records.usage_record import UsageRecord

Writer = Callable[[Iterable[Any], Callable[[Sequence[Any]], Any]], AsyncIterator[Any]]

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
    "audio_seconds",
)


class UsagePages:
    """Pages of reports and requests."""

    def __init__(self, database: Database, turns: LoopTurns) -> None:
        self._service = UsageService(database)
        self._turns = turns

    async def report(
        self,
        wanted: UsageFilter,
        buckets: BucketsQuery,
        *,
        dimensions: tuple[Dimension, ...],
        page: PageQuery,
        body: type[BaseModel],
    ) -> Response:
        """Return a page of a report as CSV, or as a list of bodies."""
        asked = ReportRequest(
            wanted=wanted, span=buckets.span, bucket=buckets.bucket, dimensions=dimensions
        )
        after = decode_cursor(page.after, parts=1 + len(dimensions))
        report = await self._service.report(asked, after=after, limit=page.limit)
        following = None if report.next is None else encode_cursor(*report.next)
        data = map(usage_fields, report.slices)
        if page.as_csv:
            columns = columns_of(USAGE_COLUMNS, wanted)
            rows = (usage_row(each, columns) for each in data)
            return await _csv(writer_of(self._turns, wanted), columns, rows, following)
        span = {"start": asked.span.start, "end": asked.span.end, "bucket": asked.bucket}
        return await _list(writer_of(self._turns, wanted), body, data, following, **span)

    async def requests(
        self,
        wanted: UsageFilter,
        span: Span,
        *,
        page: PageQuery,
        body: type[BaseModel],
    ) -> Response:
        """Return a page of requests as CSV, or as a list of bodies."""
        found, following = await read_requests(
            self._service, wanted, span, after=page.after, limit=page.limit
        )
        if page.as_csv:
            columns = columns_of(RECEIPT_COLUMNS, wanted)
            rows = (receipt_row(each, columns) for each in found)
            return await _csv(writer_of(self._turns, wanted), columns, rows, following)
        return await _list(
            writer_of(self._turns, wanted), body, map(receipt_fields, found), following
        )


async def read_requests(
    service: UsageService, wanted: UsageFilter, span: Span, *, after: str | None, limit: int
) -> tuple[list[UsageRecord], str | None]:
    """Return a page of requests, and the cursor of the next page if there is one."""
    found = await service.requests(wanted, span, before=read_position(after), limit=limit)
    return found.entries, cursor_of(found.entries[-1]) if found.has_more else None


def cursor_of(record: UsageRecord) -> str:
    """Return the cursor of a request."""
    time, request_id = position(record)
    return encode_cursor(str(to_ms(time)), request_id)


async def _list(
    write: Writer,
    body: type[BaseModel],
    data: Iterable[Mapping[str, Any]],
    following: str | None,
    **more: Any,
) -> Response:
    """Return a list as JSON. pydantic would take ten times as long as msgspec for the bodies."""
    names = tuple(body.model_fields)

    def written(part: Sequence[Mapping[str, Any]]) -> bytes:
        return encode([{name: each[name] for name in names} for each in part])[1:-1]

    parts = [part async for part in write(data, written)]
    content = {
        "object": "list",
        **more,
        "data": msgspec.Raw(b"[" + b",".join(parts) + b"]"),
        "has_more": following is not None,
        "next": following,
    }
    return Response(encode(content), media_type="application/json")


def writer_of(turns: LoopTurns, wanted: UsageFilter) -> Writer:
    """Return `LoopTurns.write` for the tenant of a filter."""
    return partial(turns.write, wanted.tenant_id or "")


def usage_row(fields: Mapping[str, Any], columns: Sequence[str]) -> list[Cell]:
    """Return the cells of the sums of a group."""
    return [fields[name] for name in columns]


def columns_of(names: Sequence[str], wanted: UsageFilter) -> list[str]:
    """Return the columns of a table; customers get no tenant column."""
    return [name for name in names if name != "tenant" or wanted.tenant_id is None]


async def _csv(
    write: Writer, headings: Sequence[str], rows: Iterable[Sequence[Cell]], following: str | None
) -> Response:
    headers = {} if following is None else {NEXT_PAGE_HEADER: following}
    parts = [part async for part in write(rows, partial(to_csv, None))]
    return Response(to_csv(headings, ()) + "".join(parts), media_type="text/csv", headers=headers)


def read_position(after: str | None) -> tuple[datetime, str] | None:
    """Return the position that a cursor of requests means. Raises InvalidParameterError."""
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
