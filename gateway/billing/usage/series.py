"""Sums of each day or hour of a period, for charts."""

from collections import defaultdict
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from gateway.billing.usage.parts import NOTHING, Dimension, UsageFilter, UsageSums, add
from gateway.billing.usage.periods import DAY, HOUR, Bucket, Span
from gateway.billing.usage.service import ReportRequest, UsageService
from gateway.records.times import day_of, hour_of

SHORT: Final = timedelta(days=3)
"""The longest period that has a sum for each hour."""
SERIES: Final = 5
"""Values of a dimension that have sums of their own."""


@dataclass(frozen=True, slots=True)
class Periods:
    """Sums of each day or hour of a period, also of those without requests."""

    names: list[str]
    """Starts of the days or hours, in UTC."""
    sums: list[UsageSums]
    parts: dict[str, list[UsageSums]]
    """Sums of the largest values of a dimension, the most expensive first."""


async def by_period(
    service: UsageService, wanted: UsageFilter, span: Span, dimension: Dimension | None = None
) -> Periods:
    """Return the sums of each day, or each hour of at most SHORT."""
    bucket = Bucket.HOUR if span.end - span.start <= SHORT else Bucket.DAY
    names = _starts(span, bucket)
    asked = ReportRequest(
        wanted=wanted,
        span=span,
        bucket=bucket,
        dimensions=() if dimension is None else (dimension,),
    )
    if dimension is None:
        slices = (await service.report(asked, after=None, limit=len(names))).slices
    else:
        slices = await service.largest(asked, count=SERIES)
    numbers = {name: number for number, name in enumerate(names)}
    whole = [NOTHING] * len(names)
    parts = defaultdict[str, list[UsageSums]](lambda: [NOTHING] * len(names))
    for each in slices:
        at = numbers[_name(each.span.start, bucket)]
        for value in each.values.values():
            parts[value][at] = each.sums
        whole[at] = add((whole[at], each.sums))
    largest = sorted(parts, key=lambda value: -sum(each.cost_micros for each in parts[value]))
    return Periods(names, whole, {value: parts[value] for value in largest})


def _starts(span: Span, bucket: Bucket) -> list[str]:
    floor, unit = (hour_of, HOUR) if bucket is Bucket.HOUR else (day_of, DAY)
    start, names = floor(span.start), []
    while start < span.end:
        names.append(_name(floor(start), bucket))
        start += unit
    return names


def _name(start: datetime, bucket: Bucket) -> str:
    return f"{start:%Y-%m-%d}" if bucket is Bucket.DAY else f"{start:%Y-%m-%d %H}:00"
