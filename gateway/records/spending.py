"""Spend limits: the most that a holder may spend in an hour, a day, a week or a month."""

import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import date, datetime, time, timedelta
from functools import lru_cache
from typing import Final
from zoneinfo import ZoneInfo

from gateway.records.limits import (
    Bounds,
    LimitName,
    Limits,
    LimitScope,
    LimitValues,
    Spending,
    SpendScope,
    SubjectLimits,
    Window,
    may_count,
)
from gateway.records.usage_record import UsageRecord

_DAY: Final = timedelta(days=1)
LAST_START: Final = 28
"""The last day on which a month may begin: every month has it."""


USER_LIMITS: Final = frozenset(
    {
        LimitName.REQUESTS_PER_MINUTE,
        LimitName.TOKENS_PER_MINUTE,
        LimitName.REQUESTS_PER_DAY,
        LimitName.TOKENS_PER_DAY,
        LimitName.CONCURRENT_REQUESTS,
    }
)
"""Limits that end users can have besides."""


def new_limit_id() -> str:
    """Return the id of a new spend limit."""
    return f"spl_{secrets.token_hex(8)}"


_SHOWN_SCOPES: Final[Mapping[SpendScope, LimitScope]] = {
    SpendScope.KEY: LimitScope.KEY,
    SpendScope.MEMBER: LimitScope.KEY,
    SpendScope.PROJECT: LimitScope.PROJECT,
    SpendScope.TENANT: LimitScope.TENANT,
    SpendScope.USER: LimitScope.KEY,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SpendAlert:
    """Mail for each month in which a tenant or one of its projects has spent an amount."""

    id: str
    tenant_id: str
    project_id: str | None
    """None: all projects."""
    amount_micros: int
    recipients: list[str]
    subject_prefix: str | None
    sent_month: str = ""
    """The last month for which it was sent, such as `2026-11`."""
    created_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class SpendLimit:
    """The most micro-dollars that a holder may spend in a window."""

    id: str
    tenant_id: str
    scope: SpendScope
    holder: str | None
    """Id of the key or project, subject of the member, or an end user; None: the tenant, or each
    end user without a limit of its own."""
    model: str | None
    """Full name of a model or adapter; None: all models."""
    window: Window
    starts_on: int
    """Day of the week (1: Monday) or of the month on which a window begins."""
    amount_micros: int | None
    """None if it only has `limits` or `repeats`."""
    repeats: int | None = None
    """The most equal requests of the key in a window."""
    limits: LimitValues = field(default_factory=dict)
    """USER_LIMITS of each end user."""
    raised_micros: int | None = None
    """The amount until `raised_until`."""
    raised_until: datetime | None = None
    raise_reason: str | None = None
    is_automatic: bool = False
    """Whether it was learned from what the key usually spends."""
    is_enforced: bool = True
    """Whether it rejects requests, or is only reported."""
    is_operators: bool = False
    """Whether only operators can change it."""
    is_from_plan: bool = False
    """Whether the tenant's plan has it."""
    created_at: datetime
    time_zone: str = "UTC"
    """That of the tenant."""

    @property
    def shown_scope(self) -> LimitScope:
        """Whose money a caller must be allowed to see."""
        return _SHOWN_SCOPES[self.scope]

    @property
    def is_of_one(self) -> bool:
        """Whether one holder has the amount, and not each end user."""
        return self.scope is not SpendScope.USER or self.holder is not None

    def amount_at(self, unix_ms: int) -> int | None:
        """Return the amount in force: a raise ends by itself."""
        is_raised = self.amount_micros is not None and self.is_raised_at(unix_ms)
        return self.raised_micros if is_raised else self.amount_micros

    def repeats_at(self, unix_ms: int) -> int | None:
        """Return how many equal requests are allowed at most; None: any number."""
        return None if self.is_raised_at(unix_ms) else self.repeats

    def reserves_at(self, unix_ms: int) -> bool:
        """Return whether requests reserve in it."""
        return bool(self.limits) or self.amount_at(unix_ms) is not None

    def is_raised_at(self, unix_ms: int) -> bool:
        """Return whether a raise is in force."""
        until = self.raised_until
        return until is not None and unix_ms < until.timestamp() * 1000

    def bounds_at(self, unix_ms: int) -> Bounds:
        """Return the windows around a moment."""
        quarter = unix_ms // (QUARTER_SECONDS * 1000)
        return _bounds(self.window, self.starts_on, self.time_zone, quarter)

    def is_of(self, credential_id: str, project_id: str | None) -> bool:
        """Return whether requests of this credential may count."""
        return may_count(self.scope, self.holder, credential_id, project_id)

    def subject_at(self, unix_ms: int, *, user: str = "") -> SubjectLimits:
        """Return the holder of this limit at a moment, for the reservation of a request."""
        limits = Limits(
            **{name.value: value for name, value in self.limits.items()},
            budget_micros=self.amount_at(unix_ms),
        )
        spending = Spending(
            self.id,
            self.scope,
            self.holder,
            self.model,
            self.window,
            self.bounds_at(unix_ms),
            user if self.scope is SpendScope.USER else "",
            self.is_automatic,
        )
        shown = user or self.holder or self.tenant_id
        return SubjectLimits(self.shown_scope, shown, limits, spending)


def missed(limits: Iterable[SpendLimit], record: UsageRecord) -> set[str]:
    """Return the names in Redis of a tenant's limits that count a request, but did not know it.

    It was admitted before they were added.
    """
    own = tuple(each for each in limits if each.is_of(record.credential_id, record.project_id))
    subjects = applied(own, record.created_ms, model=record.full_model, user=record.end_user)
    return {each.subject for each in subjects} - set(record.spend_limits)


def applied(
    limits: tuple[SpendLimit, ...], unix_ms: int, *, model: str, user: str | None
) -> tuple[SubjectLimits, ...]:
    """Return the spend limits that apply to a request of a model (its full name) and an end user.

    An end user with limits of its own has none of those of every user.
    """
    wanted = [
        each
        for each in limits
        if each.is_enforced and each.model in (None, model) and each.reserves_at(unix_ms)
    ]
    own = [each for each in wanted if each.scope is SpendScope.USER and each.holder == user]
    return tuple(
        each.subject_at(unix_ms, user=user or "")
        for each in wanted
        if each.scope is not SpendScope.USER
        or (user and (each in own or (not own and each.holder is None)))
    )


QUARTER_SECONDS: Final = 900
"""Windows begin at such times: the offsets of time zones are whole quarters of an hour."""


@lru_cache(maxsize=10_000)
def _bounds(window: Window, starts_on: int, time_zone: str, quarter: int) -> Bounds:
    """Return the windows around a quarter of an hour since 1970."""
    seconds = quarter * QUARTER_SECONDS
    if window is Window.HOUR:
        start = seconds - seconds % 3600
        return Bounds(start - 3600, start, start + 3600, start + 7200)
    zone = ZoneInfo(time_zone)
    today = datetime.fromtimestamp(seconds, zone).date()
    first = _first_day(window, starts_on, today)
    second = _next(window, first)
    days = _first_day(window, starts_on, first - _DAY), first, second, _next(window, second)
    return Bounds(*(int(datetime.combine(day, time(), zone).timestamp()) for day in days))


def _first_day(window: Window, starts_on: int, day: date) -> date:
    """Return the first day of the window that contains a day."""
    match window:
        case Window.WEEK:
            return day - (day.isoweekday() - starts_on) % 7 * _DAY
        case Window.MONTH if day.day >= starts_on:
            return day.replace(day=starts_on)
        case Window.MONTH:
            return (day.replace(day=1) - _DAY).replace(day=starts_on)
        case _:
            return day


def _next(window: Window, first: date) -> date:
    """Return the first day of the next window."""
    if window is Window.MONTH:
        return (first.replace(day=1) + 31 * _DAY).replace(day=first.day)
    return first + (7 if window is Window.WEEK else 1) * _DAY
