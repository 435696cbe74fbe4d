"""Sources of a usage report: periods from daily sums, from hourly sums, and from the ledger.

The sums of an hour are correct unless the hour is marked as dirty. Every row that is added to the
ledger marks its hour in the same transaction, until the hour is summed again. A report therefore
reads the ledger for dirty hours and for hours that it covers only partly, and never lags the
ledger.
"""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from functools import lru_cache
from itertools import pairwise
from typing import Final

from gateway.records.times import day_of, hour_of, next_month

HOUR: Final = timedelta(hours=1)
DAY: Final = timedelta(days=1)
MAX_SPANS: Final = 64
"""Maximum number of spans.

Above it, adjacent spans are read from the ledger together, which bounds the size of a query.
"""


class Bucket(StrEnum):
    """Length of the periods for which a report returns one sum each."""

    HOUR = "hour"
    DAY = "day"
    MONTH = "month"
    TOTAL = "total"


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """A period: from `start` (inclusive) to `end` (exclusive)."""

    start: datetime
    end: datetime


@dataclass(frozen=True, slots=True)
class Sources:
    """Periods that do not overlap, by their source."""

    days: tuple[Span, ...]
    hours: tuple[Span, ...]
    rows: tuple[Span, ...]


@lru_cache(maxsize=1024)
def bucket_span(bucket: Bucket, label: str, whole: Span) -> Span:
    """Return the period of a bucket by its label: its start as truncated ISO 8601; '' means all."""
    if bucket is Bucket.TOTAL:
        return whole
    full = f"{label}-01" if bucket is Bucket.MONTH else label
    start = datetime.fromisoformat(full).replace(tzinfo=UTC)
    end = {
        Bucket.HOUR: start + HOUR,
        Bucket.DAY: start + DAY,
        Bucket.MONTH: next_month(start),
    }[bucket]
    return Span(max(start, whole.start), min(end, whole.end))


def choose_sources(whole: Span, dirty_hours: Collection[datetime], *, by_hour: bool) -> Sources:
    """Return the sources of a report on a period; `by_hour` uses no daily sums.

    `dirty_hours` are the starts of hours whose sums may be wrong.
    """
    dirty = sorted({hour for hour in dirty_hours if whole.start < hour + HOUR and hour < whole.end})
    hours = _inside(whole, hour_of, HOUR)
    days = Span(hours.start, hours.start) if by_hour else _inside(whole, day_of, DAY)
    summed_days = tuple(_without(days, [(day_of(hour), DAY) for hour in dirty]))
    summed_hours = tuple(
        part
        for gap in _gaps(hours, summed_days)
        for part in _without(gap, [(hour, HOUR) for hour in dirty])
    )
    rows = tuple(_gaps(whole, sorted((*summed_days, *summed_hours))))
    if len(summed_hours) + len(rows) <= MAX_SPANS:
        return Sources(summed_days, summed_hours, rows)
    # With too many gaps, everything from the first dirty hour to the last is read from the ledger.
    return _around(whole, dirty, hours)


def _around(whole: Span, dirty: list[datetime], hours: Span) -> Sources:
    before = Span(hours.start, max(hours.start, dirty[0]))
    after = Span(min(hours.end, dirty[-1] + HOUR), hours.end)
    summed = tuple(span for span in (before, after) if span.start < span.end)
    return Sources((), summed, tuple(_gaps(whole, summed)))


def _inside(whole: Span, floor: Callable[[datetime], datetime], unit: timedelta) -> Span:
    """Return the largest period of whole units inside; an empty one if there is none."""
    start = floor(whole.start)
    if start < whole.start:
        start += unit
    return Span(start, max(start, floor(whole.end)))


def _without(span: Span, holes: list[tuple[datetime, timedelta]]) -> Iterator[Span]:
    edge = span.start
    for start, length in holes:
        if start + length <= edge or start >= span.end:
            continue
        if edge < start:
            yield Span(edge, start)
        edge = start + length
    if edge < span.end:
        yield Span(edge, span.end)


def _gaps(span: Span, parts: Collection[Span]) -> Iterator[Span]:
    inside = [part for part in parts if part.start < span.end and part.end > span.start]
    edges = [span.start, *(time for part in inside for time in (part.start, part.end)), span.end]
    for start, end in list(pairwise(edges))[::2]:
        if start < end:
            yield Span(start, end)
