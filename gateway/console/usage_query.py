"""What the usage pages of both audiences ask for, from their query."""

from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from typing import Final
from urllib.parse import parse_qs, urlencode

from fastapi import Request

from contract.tier import ServiceTier
from gateway.accounts.routes_common import MAX_CURSOR_CHARACTERS, MAX_TEXT_CHARACTERS
from gateway.billing.usage.parts import UsageFilter
from gateway.billing.usage.periods import DAY, Span
from gateway.billing.usage.query import read_span
from gateway.console.forms import MAX_FIELDS, Form
from gateway.platform.database.tables import FAILED_OUTCOMES
from gateway.records.checks import is_storable
from gateway.records.errors import InvalidParameterError, must
from gateway.records.times import day_of, month_start, utc_now
from gateway.records.usage_record import Outcome

DAYS: Final = 30
"""Days of the chart on the first page."""
WEEK: Final = timedelta(days=7)
PRESETS: Final = {"24h": 0, "7d": 7, "30d": DAYS, "month": None}
"""Days of periods that end now: 0 are 24 hours, None begins with the month."""
FAILURES: Final = "failures"
OUTCOMES: Final[Mapping[str, tuple[Outcome, ...]]] = {
    "": (),
    FAILURES: FAILED_OUTCOMES,
    **{each.value: (each,) for each in Outcome},
}
"""Outcomes by the values of their filter."""
_FIELDS: Final = (
    *("range", "start", "end", "model", "key", "project", "tenant", "by", "outcome", "tier"),
)


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
            outcomes=OUTCOMES.get(self.form["outcome"], ()),
        )

    @property
    def days(self) -> tuple[str, str]:
        """The first and last day of the period, as their fields have them."""
        if self.error is not None:
            return self.form["start"], self.form["end"]
        last = self.span.end - timedelta(microseconds=1)
        return f"{self.span.start:%Y-%m-%d}", f"{last:%Y-%m-%d}"

    def checked_span(self) -> Span:
        """Return the period. Raises the query's `error`."""
        if self.error is not None:
            raise self.error
        return self.span

    def link(self, path: str, **changes: str | None) -> str:
        """Return a link with the same filters and some changes."""
        values = {name: self.form[name] for name in _FIELDS} | changes
        query = urlencode({name: value for name, value in values.items() if value})
        return f"{path}?{query}" if query else path

    def _check(self) -> None:
        for name in ("model", "key", "project", "tenant", "id"):
            _check_text(name, self.form[name], MAX_TEXT_CHARACTERS)
        known: tuple[tuple[str, Iterable[str]], ...]
        known = (("tier", ServiceTier), ("outcome", OUTCOMES), ("range", PRESETS))
        for name, values in known:
            if self.form[name] not in ("", *values):
                options = ", ".join(filter(None, values))
                raise must(name, f"be one of {options}", self.form[name])

    def _span(self) -> Span:
        now = utc_now()
        if self.preset:
            days = PRESETS[self.preset]
            if days is None:
                return Span(month_start(now), now)
            return last_days(now, days) if days else Span(now - DAY, now)
        start, end = self.form["start"], self.form["end"]
        if len(end) == len("2026-11-01"):
            # A person means the whole last day.
            end = (read_span(None, end).end + DAY).isoformat()
        return read_span(start or None, end or None) if start or end else last_days(now)


def _check_text(name: str, value: str, most: int) -> None:
    if len(value) > most or not is_storable(value):
        raise must(name, f"be at most {most} characters without control characters", value)


def last_days(now: datetime, days: int = DAYS) -> Span:
    """Return a period that ends now and begins at midnight; the current day counts."""
    return Span(day_of(now - timedelta(days=days - 1)), now)
