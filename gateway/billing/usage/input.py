"""Parse user input for usage reports: times, periods and dimensions."""

import re
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final

from gateway.billing.usage.parts import Dimension
from gateway.billing.usage.periods import DAY, Bucket, Span, next_month
from gateway.records.errors import InvalidParameterError, must
from gateway.records.times import day_of, utc_now

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
