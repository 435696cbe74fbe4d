"""Service history for the status page: served and failed requests and first tokens, by model.

It is read from SQL and cached for a few seconds. It contains no tenant data.
"""

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import date, datetime
from typing import Any, Final, NamedTuple, Self, TypeVar

from sqlalchemy import and_, or_, select

from gateway.billing.ledger.rollups import DAY, HOUR
from gateway.platform.database.engine import Database
from gateway.platform.database.tables import (
    FIRST_TOKENS,
    RejectionRow,
    RollupPeriod,
    ServiceRollupRow,
)
from gateway.records.errors import StoreUnavailableError
from gateway.records.times import day_of, hour_of, utc_now
from gateway.records.usage_record import quantile_ms

DAYS: Final = 90
"""Days that are read, today included."""
HOURS: Final = 24
"""Hours that are read, the current one included."""
FRESH_SECONDS: Final = 10.0
"""Time for which a process shows what it has read, also that SQL is unavailable."""
PATIENCE_SECONDS: Final = 3.0
"""Time that a reader waits for SQL."""

T = TypeVar("T")

logger = logging.getLogger(__name__)


class Served(NamedTuple):
    """Requests of a period."""

    requests: int = 0
    """Requests that finished, and those that the service failed or rejected."""
    failed_requests: int = 0
    first_tokens: tuple[int, ...] = (0,) * len(FIRST_TOKENS)
    """First tokens in each bucket of `BOUNDS_MS`, each tenant of an hour with the same weight."""

    @classmethod
    def total(cls, parts: Iterable["Served"]) -> Self:
        """Return the sum of periods or models."""
        known: list[Served] = [cls(), *parts]
        buckets = zip(*(each.first_tokens for each in known), strict=True)
        return cls(
            sum(each.requests for each in known),
            sum(each.failed_requests for each in known),
            tuple(map(sum, buckets)),
        )

    @property
    def availability(self) -> float | None:
        """The percentage that did not fail, rounded down to hundredths; None without requests."""
        if not self.requests:
            return None
        return 10_000 * (self.requests - self.failed_requests) // self.requests / 100

    @property
    def p50_ms(self) -> int | None:
        """Median of the time to the first token, which one of five tenants cannot set."""
        return quantile_ms(self.first_tokens, 50)

    @property
    def p75_ms(self) -> int | None:
        """75th percentile of the time to the first token, likewise."""
        return quantile_ms(self.first_tokens, 75)


@dataclass(frozen=True, slots=True)
class RecordedService:
    """What was recorded until a moment."""

    read_at: datetime
    is_known: bool = True
    """False if SQL is unavailable."""
    days: Mapping[date, Mapping[str, Served]] = field(default_factory=dict)
    """By day and model. The model is empty for requests whose model was not known."""
    hours: Mapping[datetime, Mapping[str, Served]] = field(default_factory=dict)
    """Of the last `HOURS`, by their beginnings and models."""
    _derived: dict[object, asyncio.Task[Any]] = field(default_factory=dict)

    def recent(self, model: str) -> Served:
        """Return the requests of a model in the current and the last hour."""
        this_hour = hour_of(self.read_at)
        return Served.total(
            self.hours.get(hour, {}).get(model, Served()) for hour in (this_hour - HOUR, this_hour)
        )

    @property
    def last_day(self) -> Served:
        """The requests of all models in the last `HOURS`."""
        return Served.total(each for models in self.hours.values() for each in models.values())

    async def once(self, key: object, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Return what `make` returns, which is called once for all callers with this key."""
        task = self._derived.get(key)
        if task is None:
            task = self._derived[key] = asyncio.create_task(make())
        made: T = await asyncio.shield(task)
        return made


class ServiceHistory:
    """The history that a process has read last."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._history: RecordedService | None = None
        self._expires_at = 0.0
        self._reading = asyncio.Lock()

    async def get(self) -> RecordedService:
        """Return the history of the last `DAYS` days, at most `FRESH_SECONDS` old."""
        async with self._reading:
            if self._history is None or time.monotonic() >= self._expires_at:
                self._history = await self._read()
                self._expires_at = time.monotonic() + FRESH_SECONDS
            return self._history

    async def _read(self) -> RecordedService:
        now = utc_now()
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                return await self._from_sql(now)
        except (StoreUnavailableError, TimeoutError) as error:
            logger.warning("cannot read the history of the service: %s", error)
            return RecordedService(now, is_known=False)

    async def _from_sql(self, now: datetime) -> RecordedService:
        first_day, first_hour = day_of(now) - (DAYS - 1) * DAY, hour_of(now) - (HOURS - 1) * HOUR
        columns = ServiceRollupRow.__table__.c
        numbers = ("requests", "failed_requests", *FIRST_TOKENS)
        async with self._database.snapshot() as transaction:
            sums = await transaction.execute(
                select(
                    ServiceRollupRow.period,
                    ServiceRollupRow.start_at,
                    ServiceRollupRow.model,
                    *(columns[name] for name in numbers),
                ).where(
                    or_(
                        and_(
                            ServiceRollupRow.period == RollupPeriod.DAY,
                            ServiceRollupRow.start_at >= first_day,
                        ),
                        and_(
                            ServiceRollupRow.period == RollupPeriod.HOUR,
                            ServiceRollupRow.start_at >= first_hour,
                        ),
                    )
                )
            )
            rejections = await transaction.execute(
                select(RejectionRow.hour, RejectionRow.model, RejectionRow.requests).where(
                    RejectionRow.hour >= first_day
                )
            )
        days: defaultdict[date, defaultdict[str, list[Served]]]
        hours: defaultdict[datetime, defaultdict[str, list[Served]]]
        days = defaultdict(lambda: defaultdict(list))
        hours = defaultdict(lambda: defaultdict(list))
        for period, start, model, requests, failed, *buckets in sums:
            served = Served(requests, failed, tuple(each or 0 for each in buckets))
            if period is RollupPeriod.DAY:
                days[start.date()][model].append(served)
            else:
                hours[start][model].append(served)
        for hour, model, requests in rejections:
            rejected = Served(requests, requests)
            days[hour.date()][model].append(rejected)
            if hour >= first_hour:
                hours[hour][model].append(rejected)
        return RecordedService(
            now,
            days={day: _totals(models) for day, models in days.items()},
            hours={hour: _totals(models) for hour, models in hours.items()},
        )


def _totals(models: Mapping[str, Iterable[Served]]) -> dict[str, Served]:
    return {model: Served.total(parts) for model, parts in models.items()}
