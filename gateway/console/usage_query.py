"""What the usage pages of both audiences ask for, from their query."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from types import MappingProxyType
from typing import Final
from urllib.parse import parse_qs, urlencode

from fastapi import Request

from contract.tier import ServiceTier
from gateway.accounts.shared import MAX_CURSOR_CHARACTERS, MAX_TEXT_CHARACTERS
from gateway.billing.usage.parts import Dimension, UsageFilter, UsageSums
from gateway.billing.usage.periods import DAY, HOUR, Bucket, Span
from gateway.billing.usage.query import read_span
from gateway.billing.usage.service import ReportRequest, UsageService, UsageSlice
from gateway.console.charts import Chart, Measure, stacked
from gateway.console.forms import MAX_FIELDS, Form
from gateway.records.checks import is_storable
from gateway.records.errors import InvalidParameterError, must
from gateway.records.times import day_of, hour_of, month_start, utc_now
from gateway.records.usage_record import Outcome

DAYS: Final = 30
"""Days of the chart on the first page."""
WEEK: Final = timedelta(days=7)
SHORT: Final = timedelta(days=3)
"""The longest period that has a sum for each hour."""
SERIES: Final = 5
"""Values of a dimension in a chart."""
PRESETS: Final = {
    "24h": timedelta(hours=24),
    "7d": WEEK,
    "30d": timedelta(days=30),
    "month": None,
}
"""Periods that end now; None begins with the month."""
_FIELDS: Final = (
    *("range", "start", "end", "model", "key", "project", "tenant", "by", "outcome", "tier"),
)


@dataclass(frozen=True, slots=True)
class Periods:
    """Sums of each day or hour of a period, also of those without requests."""

    names: list[str]
    """Starts of the days or hours, in UTC."""
    sums: list[UsageSums]
    parts: dict[str, list[UsageSums]]
    """Sums of the largest values of a dimension, the most expensive first."""

    def chart(
        self,
        title: str,
        measure: Measure,
        value: Callable[[UsageSums], int],
        names: Mapping[str, str] = MappingProxyType({}),
    ) -> Chart:
        """Return a chart; what the largest values leave is one more series."""
        per = "hour" if len(self.names[0]) > len("2026-11-01") else "day"
        rest = [value(each) for each in self.sums]
        series = []
        for name, sums in self.parts.items():
            values = [value(each) for each in sums]
            rest = [whole - part for whole, part in zip(rest, values, strict=True)]
            series.append((names.get(name, name) or "none", values))
        if not series:
            series, rest = [("all", rest)], []
        shown = rest if any(rest) else ()
        return stacked(f"{title} per {per} (UTC)", measure, self.names, series, shown)


def cost(sums: UsageSums) -> int:
    """Return the cost in micro-dollars."""
    return sums.cost_micros


def tokens(sums: UsageSums) -> int:
    """Return the tokens of prompts and completions."""
    return sums.prompt_tokens + sums.completion_tokens


def requests(sums: UsageSums) -> int:
    """Return the number of requests."""
    return sums.requests


NOTHING: Final = UsageSums(*[0] * len(UsageSums._fields))


def add(parts: Iterable[UsageSums]) -> UsageSums:
    """Return the sum of sums."""
    return UsageSums(*map(sum, zip(NOTHING, *parts, strict=True)))


class UsageQuery:
    """The query of a usage page; empty fields are absent. Raises InvalidParameterError.

    What a visitor chooses and types raises nothing: a page shows the `error` next to its field.
    """

    def __init__(self, request: Request) -> None:
        try:
            fields = parse_qs(request.url.query, max_num_fields=MAX_FIELDS)
        except ValueError:
            raise InvalidParameterError(
                f"The query must have at most {MAX_FIELDS} parameters.", param="query"
            ) from None
        self.form = Form(fields)
        for name in ("after", "newer"):
            _check_text(name, self.form[name], MAX_CURSOR_CHARACTERS)
        self.preset = self.form["range"]
        self.error: InvalidParameterError | None = None
        try:
            self._check()
            self.span = self._span()
        except InvalidParameterError as error:
            self.error, self.span = error, read_span(None, None)

    @property
    def wanted(self) -> UsageFilter:
        """The filter without its `error`; the caller adds what the visitor may see."""
        return UsageFilter(
            tenant_id=self.form["tenant"] or None,
            project_id=self.form["project"] or None,
            credential_id=self.form["key"] or None,
            model=self.form["model"] or None,
            service_tier=next((each for each in ServiceTier if each == self.form["tier"]), None),
            outcome=next((each for each in Outcome if each == self.form["outcome"]), None),
        )

    @property
    def days(self) -> tuple[str, str]:
        """The first and last day of the period, as their fields have them."""
        if self.error is not None:
            return self.form["start"], self.form["end"]
        last = self.span.end - timedelta(microseconds=1)
        return f"{self.span.start:%Y-%m-%d}", f"{last:%Y-%m-%d}"

    @property
    def newer(self) -> str | None:
        """The start of the page that follows, newest first."""
        return self.form["newer"] or None

    @property
    def after(self) -> str | None:
        """The end of the previous page."""
        return self.form["after"] or None

    def link(self, path: str, **changes: str | None) -> str:
        """Return a link with the same filters and some changes."""
        values = {name: self.form[name] for name in _FIELDS} | changes
        query = urlencode({name: value for name, value in values.items() if value})
        return f"{path}?{query}" if query else path

    def _check(self) -> None:
        for name in ("model", "key", "project", "tenant", "id"):
            _check_text(name, self.form[name], MAX_TEXT_CHARACTERS)
        known: tuple[tuple[str, Iterable[str]], ...]
        known = (("tier", ServiceTier), ("outcome", Outcome), ("range", PRESETS))
        for name, values in known:
            if self.form[name] not in ("", *values):
                raise must(name, f"be one of {', '.join(values)}", self.form[name])

    def _span(self) -> Span:
        now = utc_now()
        if self.preset:
            days = PRESETS[self.preset]
            return Span(month_start(now), now) if days is None else Span(now - days, now)
        start, end = self.form["start"], self.form["end"]
        if len(end) == len("2026-11-01"):
            # A person means the whole last day.
            end = (read_span(None, end).end + DAY).isoformat()
        return read_span(start or None, end or None)


def _check_text(name: str, value: str, most: int) -> None:
    if len(value) > most or not is_storable(value):
        raise must(name, f"be at most {most} characters without control characters", value)


async def total(service: UsageService, wanted: UsageFilter, span: Span) -> UsageSums:
    """Return the sums of a period."""
    asked = ReportRequest(wanted=wanted, span=span, bucket=Bucket.TOTAL)
    report = await service.report(asked, after=None, limit=1)
    return report.slices[0].sums if report.slices else NOTHING


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
    whole, parts = await service.series(asked, count=SERIES, limit=len(names))
    numbers = {name: number for number, name in enumerate(names)}

    def placed(slices: Iterable[UsageSlice]) -> list[UsageSums]:
        sums = [NOTHING] * len(names)
        for each in slices:
            sums[numbers[_name(each.span.start, bucket)]] = each.sums
        return sums

    found = defaultdict[str, list[UsageSlice]](list)
    for each in parts:
        found[each.values[asked.dimensions[0]]].append(each)
    sums = {value: placed(slices) for value, slices in found.items()}
    largest = sorted(sums, key=lambda value: -sum(map(cost, sums[value])))
    return Periods(names, placed(whole), {value: sums[value] for value in largest})


def last_days(now: datetime) -> Span:
    """Return a period that ends now and begins at midnight."""
    return Span(day_of(now - timedelta(days=DAYS - 1)), now)


async def by_dimension(
    service: UsageService,
    wanted: UsageFilter,
    span: Span,
    dimension: Dimension,
    *,
    after: Sequence[str] | None,
    limit: int,
) -> tuple[list[tuple[str, UsageSums]], tuple[str, ...] | None]:
    """Return the sums of each value of a dimension, by name, and the position of the next page."""
    asked = ReportRequest(wanted=wanted, span=span, bucket=Bucket.TOTAL, dimensions=(dimension,))
    report = await service.report(asked, after=after, limit=limit)
    return [(each.values[dimension], each.sums) for each in report.slices], report.next


def _starts(span: Span, bucket: Bucket) -> list[str]:
    floor, unit = (hour_of, HOUR) if bucket is Bucket.HOUR else (day_of, DAY)
    start, names = floor(span.start), []
    while start < span.end:
        names.append(_name(floor(start), bucket))
        start += unit
    return names


def _name(start: datetime, bucket: Bucket) -> str:
    return f"{start:%Y-%m-%d}" if bucket is Bucket.DAY else f"{start:%Y-%m-%d %H}:00"
