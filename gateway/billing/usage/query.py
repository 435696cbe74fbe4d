"""Query parameters of usage routes: time range, groups, page and format."""

import base64
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Final, Literal

import msgspec
from fastapi import Depends, Header, Query

from gateway.accounts.routes_common import MAX_CURSOR_CHARACTERS, PLAIN, PRINTABLE, text_filter
from gateway.billing.usage.parts import Dimension, UsageFilter
from gateway.billing.usage.periods import DAY, Bucket, Span
from gateway.records.errors import InvalidParameterError, must
from gateway.records.times import day_of, next_month, utc_now

DEFAULT_DAYS: Final = 30
MAX_DAYS: Final = 400
MAX_DAYS_BY_HOUR: Final = 31
FIRST_YEAR, LAST_YEAR = 2000, 2999

_MONTH = re.compile(r"[0-9]{4}-(0[1-9]|1[0-2])")


def read_span(start: str | None, end: str | None, *, bucket: Bucket | None = None) -> Span:
    """Return the requested period. Raises InvalidParameterError."""
    last = utc_now() if end is None else _read_time("end", end)
    first = day_of(last - DEFAULT_DAYS * DAY) if start is None else _read_time("start", start)
    if first >= last:
        raise InvalidParameterError("'start' must be before 'end'.", param="start")
    most = MAX_DAYS_BY_HOUR if bucket is Bucket.HOUR else MAX_DAYS
    if last - first > most * DAY:
        of_hours = " for hourly sums" if bucket is Bucket.HOUR else ""
        raise must("start", f"be at most {most} days before 'end'{of_hours}", (last - first).days)
    return Span(first, last)


def read_dimensions(group_by: Sequence[str], known: Sequence[Dimension]) -> tuple[Dimension, ...]:
    """Return the dimensions to group by, in the order of `known`. Raises InvalidParameterError."""
    names = {name.strip() for text in group_by for name in text.split(",")} - {""}
    if unknown := names.difference(known):
        raise must("group_by", f"name any of {', '.join(known)}", min(unknown))
    return tuple(dimension for dimension in known if dimension in names)


def _read_time(name: str, text: str) -> datetime:
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        time = None
    if time is None or not FIRST_YEAR <= time.year <= LAST_YEAR:
        example = "such as 2026-11-01 or 2026-11-01T10:00:00Z"
        raise must(name, f"be a date or time from {FIRST_YEAR} to {LAST_YEAR}, {example}", text)
    return time.replace(tzinfo=UTC) if time.tzinfo is None else time.astimezone(UTC)


def read_month(text: str) -> Span:
    """Parse a month such as 2026-11. Raises InvalidParameterError."""
    if _MONTH.fullmatch(text) is None:
        raise must("month", "be a month such as 2026-11", text)
    start = _read_time("month", f"{text}-01")
    return Span(start, next_month(start))


MAX_USAGE_PAGE: Final = 1000
MAX_TIME_CHARACTERS: Final = 40


def _time(description: str) -> object:
    return Query(
        max_length=MAX_TIME_CHARACTERS,
        description=f"{description} A date or time such as `2026-11-01` or `2026-11-01T10:00:00Z`; "
        "UTC if it has no zone.",
    )


Start = Annotated[
    str | None, _time("Start, inclusive. Default: 30 days before the end, at midnight.")
]
End = Annotated[str | None, _time("End, exclusive. Default: now.")]


@dataclass(frozen=True, slots=True)
class BucketsQuery:
    """A time range and its buckets."""

    span: Span
    bucket: Bucket


@dataclass(frozen=True, slots=True)
class PageQuery:
    """The requested page and its format."""

    after: str | None
    limit: int
    as_csv: bool


async def wanted_query(
    model: Annotated[str | None, text_filter("Only this model.")] = None,
    key: Annotated[str | None, text_filter("Only this key, by its id, or `jwt:SUBJECT`.")] = None,
    project: Annotated[str | None, text_filter("Only this project, by its id.")] = None,
) -> UsageFilter:
    """Return the usage filter; the caller adds the tenant."""
    return UsageFilter(tenant_id=None, project_id=project, credential_id=key, model=model)


async def span_query(start: Start = None, end: End = None) -> Span:
    """Return the requested time range."""
    return read_span(start, end)


async def buckets_query(
    start: Start = None,
    end: End = None,
    bucket: Annotated[
        Bucket, Query(description="Length of the period of each sum; `hour` for at most 31 days.")
    ] = Bucket.DAY,
) -> BucketsQuery:
    """Return the requested time range and buckets."""
    return BucketsQuery(read_span(start, end, bucket=bucket), bucket)


async def page_query(
    after: Annotated[
        str | None,
        Query(
            min_length=1,
            max_length=MAX_CURSOR_CHARACTERS,
            pattern=PRINTABLE,
            description="`next` of the previous page; for CSV, its header `x-next-page`.",
        ),
    ] = None,
    limit: Annotated[
        int, Query(ge=1, le=MAX_USAGE_PAGE, description="Maximum entries of one page."), PLAIN
    ] = 100,
    format_: Annotated[
        Literal["json", "csv"] | None,
        Query(alias="format", description="Default: the first format in the `Accept` header."),
    ] = None,
    accept: Annotated[str, Header(include_in_schema=False)] = "",
) -> PageQuery:
    """Return the requested page."""
    return PageQuery(after, limit, as_csv=wants_csv(format_, accept))


WantedUsage = Annotated[UsageFilter, Depends(wanted_query)]
AskedSpan = Annotated[Span, Depends(span_query)]
AskedBuckets = Annotated[BucketsQuery, Depends(buckets_query)]
AskedPage = Annotated[PageQuery, Depends(page_query)]


def encode_cursor(*values: str) -> str:
    """Return the cursor of the end of a page, which the client sends back."""
    return base64.urlsafe_b64encode(msgspec.json.encode(values)).rstrip(b"=").decode()


def decode_cursor(after: str | None, parts: int) -> tuple[str, ...] | None:
    """Return the texts of a cursor. Raises InvalidParameterError if it is invalid."""
    if after is None:
        return None
    try:
        text = base64.urlsafe_b64decode(after + "=" * (-len(after) % 4))
        values = msgspec.json.decode(text, type=tuple[str, ...])
    except (ValueError, msgspec.DecodeError):
        values = ()
    # PostgreSQL rejects a comparison with NUL.
    if len(values) != parts or any("\x00" in value for value in values):
        raise bad_cursor()
    return values


def bad_cursor() -> InvalidParameterError:
    """Return the error for an invalid cursor."""
    return InvalidParameterError(
        "'after' must be 'next' of a page of the same list.", param="after"
    )


def wants_csv(format_: str | None, accept: str) -> bool:
    """Whether the response is CSV."""
    if format_ is not None:
        return format_ == "csv"
    named = [part.split(";")[0].strip().lower() for part in accept.split(",")]
    offered = [name for name in named if name in ("text/csv", "application/json", "*/*")]
    return offered[:1] == ["text/csv"]
