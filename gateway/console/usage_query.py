"""What the usage pages of both audiences ask for, from their query."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final
from urllib.parse import parse_qs, urlencode

from fastapi import Request

from gateway.accounts.shared import MAX_CURSOR_CHARACTERS, MAX_TEXT_CHARACTERS
from gateway.billing.usage.parts import Dimension, UsageFilter, UsageSums
from gateway.billing.usage.periods import DAY, Bucket, Span
from gateway.billing.usage.query import read_span
from gateway.billing.usage.service import ReportRequest, UsageService
from gateway.console.forms import MAX_FIELDS, Form
from gateway.records.checks import is_storable
from gateway.records.errors import InvalidParameterError, must
from gateway.records.money import show_dollars
from gateway.records.times import day_of

DAYS: Final = 30
"""Days of the chart on the first page."""
_MOST_DAYS: Final = 400


@dataclass(frozen=True, slots=True)
class Point:
    """The sums of one day."""

    day: str
    sums: UsageSums

    def of_cost(self) -> tuple[str, int, str]:
        """Return the day as a bar of its cost."""
        text = f"{self.day}: {show_dollars(self.sums.cost_micros)}"
        return self.day[5:], self.sums.cost_micros, text

    def of_tokens(self) -> tuple[str, int, str]:
        """Return the day as a bar of its tokens."""
        tokens = self.sums.prompt_tokens + self.sums.completion_tokens
        return self.day[5:], tokens, f"{self.day}: {tokens:,} tokens"

    def of_requests(self) -> tuple[str, int, str]:
        """Return the day as a bar of its requests."""
        sums = self.sums
        text = f"{self.day}: {sums.requests:,} requests, {sums.failed_requests:,} failed"
        return self.day[5:], sums.requests, text


NOTHING: Final = UsageSums(0, 0, 0, 0, 0, 0)


def add(parts: Iterable[UsageSums]) -> UsageSums:
    """Return the sum of sums."""
    return UsageSums(*map(sum, zip(NOTHING, *parts, strict=True)))


class UsageQuery:
    """The query of a usage page; empty fields are absent.

    Raises InvalidParameterError.
    """

    def __init__(self, request: Request) -> None:
        try:
            fields = parse_qs(request.url.query, max_num_fields=MAX_FIELDS)
        except ValueError:
            raise InvalidParameterError(
                f"The query must have at most {MAX_FIELDS} parameters.", param="query"
            ) from None
        self.form = Form(fields)
        for name in ("model", "key", "project", "tenant"):
            _check_text(name, self.form[name], MAX_TEXT_CHARACTERS)
        _check_text("after", self.form["after"], MAX_CURSOR_CHARACTERS)
        self.start = self.form["start"]
        self.end = self.form["end"]
        self.span = self._span()

    @property
    def wanted(self) -> UsageFilter:
        """The filter; the caller adds what the visitor may see."""
        return UsageFilter(
            tenant_id=self.form["tenant"] or None,
            project_id=self.form["project"] or None,
            credential_id=self.form["key"] or None,
            model=self.form["model"] or None,
        )

    @property
    def after(self) -> str | None:
        """The end of the previous page."""
        return self.form["after"] or None

    def link(self, path: str, **changes: str | None) -> str:
        """Return a link with the same filters and some changes."""
        names = ("start", "end", "model", "key", "project", "tenant", "by")
        values = {name: self.form[name] for name in names} | changes
        query = urlencode({name: value for name, value in values.items() if value})
        return f"{path}?{query}" if query else path

    def _span(self) -> Span:
        end = self.end
        if len(end) == len("2026-11-01"):
            # A person means the whole last day.
            whole = read_span(None, end).end + DAY
            end = whole.isoformat()
        return read_span(self.start or None, end or None)


def _check_text(name: str, value: str, most: int) -> None:
    if len(value) > most or not is_storable(value):
        raise must(name, f"be at most {most} characters without control characters", value)


async def total(service: UsageService, wanted: UsageFilter, span: Span) -> UsageSums:
    """Return the sums of a period."""
    asked = ReportRequest(wanted=wanted, span=span, bucket=Bucket.TOTAL)
    report = await service.report(asked, after=None, limit=1)
    return report.slices[0].sums if report.slices else NOTHING


async def daily(service: UsageService, wanted: UsageFilter, span: Span) -> list[Point]:
    """Return the sums of each day of a period, also of days without requests."""
    asked = ReportRequest(wanted=wanted, span=span, bucket=Bucket.DAY)
    report = await service.report(asked, after=None, limit=_MOST_DAYS + 2)
    found = {each.span.start.date().isoformat(): each.sums for each in report.slices}
    return [Point(day, found.get(day, NOTHING)) for day in _days(span)]


def last_days(now: datetime, days: int = DAYS) -> Span:
    """Return a period that ends now and begins at midnight."""
    return Span(day_of(now - timedelta(days=days - 1)), now)


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


def _days(span: Span) -> list[str]:
    days, day = [], day_of(span.start)
    while day < span.end:
        days.append(day.date().isoformat())
        day += DAY
    return days
