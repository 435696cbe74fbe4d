"""Reconcile Redis with the ledger, and the ledger's rows with their rollups.

The numbers of a subject in Redis must equal the ledger's sums plus the records that are not yet
drained. A wrong number is not corrected: the subject is unseeded, and its numbers are derived again
when they are next needed.
"""

import asyncio
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Final, NamedTuple

from redis.asyncio import Redis
from sqlalchemy import select

from contract import keys
from gateway.billing.credits.spending import correct
from gateway.billing.ledger.drain import FIELD
from gateway.billing.ledger.rollups import DAY, Rollups
from gateway.billing.ledger.store import LedgerStore, read_balances
from gateway.limits import counters
from gateway.limits.counters import DAY_MS, AccountNumbers, Period, period_of
from gateway.limits.store import QuotaStore
from gateway.platform.database.engine import Database
from gateway.platform.database.holders import spend_limits_of
from gateway.platform.database.tables import ApiKeyRow, ProjectRow, SpendLimitRow, TenantRow
from gateway.platform.redis_client import shared_connection
from gateway.records.limits import SPENDING, Limits, LimitScope, SubjectLimits, subject_of
from gateway.records.times import day_of, to_ms, utc_now
from gateway.records.usage_record import UsageRecord, readable_usage

LOOKS: Final = 3
"""A number that differs by the same amount in this many reads is wrong.

One difference may only mean that usage reached the ledger between two reads.
"""
MOST_LOOKS: Final = 8
PAUSE_SECONDS: Final = 0.2
MOST_UNDRAINED: Final = 20_000
"""A bucket with more undrained records is left for the next run."""
PASS_SECONDS: Final = 3600.0
"""Least time between the beginnings of two passes over everything."""
ROLLUP_DAYS: Final = 3
"""Days whose rollups are compared with their rows."""

_TENANTS: Final = {
    LimitScope.TENANT: (TenantRow.id, TenantRow.id.label("tenant_id")),
    LimitScope.PROJECT: (ProjectRow.id, ProjectRow.tenant_id),
    LimitScope.KEY: (ApiKeyRow.id, ApiKeyRow.tenant_id),
}
"""Columns with the ids of holders of limits, and those of their tenants."""
_NUMBERS: Final = {
    "requests_of_day": "requests",
    "tokens_of_day": "tokens",
    "audio_seconds_of_day": "audio_seconds",
    "cost_of_month": "cost_micros",
    "credit": "credit_micros",
}
"""Names of the numbers that are compared, and their fields in an account."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A number that was wrong in Redis."""

    tenant_id: str
    subject: str
    """Such as `t:acme`."""
    number: str
    """`requests_of_day`, `tokens_of_day`, `audio_seconds_of_day`, `cost_of_month` or `credit`."""
    redis: int
    ledger: int
    """The value from the ledger and the undrained records."""


@dataclass(slots=True, kw_only=True)
class ReconcileReport:
    """What was compared, and the differences that were found and healed."""

    compared_accounts: int = 0
    busy_accounts: int = 0
    """Subjects that kept changing; they are compared in the next run."""
    differences: list[Difference] = field(default_factory=list)
    corrected_reservations: int = 0
    """Subjects with a wrong amount held by open reservations."""
    forgotten_requests: int = 0
    """Concurrent requests that had no reservation."""
    wrong_hours: list[datetime] = field(default_factory=list)
    """Hours whose rollups did not match their rows."""
    wrong_balances: list[str] = field(default_factory=list)
    """Tenants whose sum of prepaid requests did not match their rows."""

    @property
    def is_clean(self) -> bool:
        """Whether no difference was found."""
        return not (
            self.differences
            or self.corrected_reservations
            or self.forgotten_requests
            or self.wrong_hours
            or self.wrong_balances
        )


class _Counters(NamedTuple):
    """A subject's counters in Redis and its undrained records, read at one moment."""

    numbers: AccountNumbers
    undrained: Sequence[UsageRecord]


class _Holder(NamedTuple):
    tenant_id: str
    limits: SubjectLimits

    @property
    def subject(self) -> str:
        return self.limits.subject

    def owns(self, record: UsageRecord) -> bool:
        return record.tenant_id == self.tenant_id and record.counts_for(self.limits)


async def reconcile(
    redis: Redis, database: Database, *, rollup_days: int = ROLLUP_DAYS
) -> ReconcileReport:
    """Compare everything once, heal differences and report them. Raises as `Reconciler.run`."""
    report = ReconcileReport()
    await Reconciler(redis, database, rollup_days=rollup_days).run(report)
    return report


class Reconciler:
    """Compares everything in passes, which begin at most once an hour, in slices.

    The rollups of the last `rollup_days`, today included, are compared with their rows.
    """

    def __init__(self, redis: Redis, database: Database, *, rollup_days: int = ROLLUP_DAYS) -> None:
        self._redis = redis
        self._executor = shared_connection(redis)
        self._database = database
        self._store = QuotaStore(self._executor)
        self._rollup_days = rollup_days
        self._report = ReconcileReport()
        self._begins_at = -math.inf
        self._parts: deque[Callable[[], Awaitable[None]]] = deque()
        self._failed: set[Callable[[], Awaitable[None]]] = set()

    async def run(self, report: ReconcileReport, *, seconds: float = math.inf) -> None:
        """Compare for some time from where the last call ended, and report what was compared.

        A part that fails delays no other part: the call after the pass compares it again. Raises
        the first error, a RedisError or StoreUnavailableError, at the end.
        """
        self._report = report
        deadline, errors = time.monotonic() + seconds, list[Exception]()
        if not self._parts:
            self._begin()
        while self._parts:
            part = self._parts.popleft()
            self._failed.add(part)
            try:
                await part()
            except Exception as error:  # One bad account or bucket hides no other difference.
                errors.append(error)
            else:
                self._failed.discard(part)
            if time.monotonic() >= deadline:
                break
        if errors:
            raise errors[0]

    def _begin(self) -> None:
        if time.monotonic() < self._begins_at:
            self._parts.extend(self._failed)
            return
        self._begins_at = time.monotonic() + PASS_SECONDS
        self._failed.clear()
        for bucket in range(keys.BUCKETS):
            self._parts.append(partial(self._find_accounts, bucket))
            self._parts.append(partial(self._audit_reservations, bucket))
        # Day by day: reports read the rows of marked hours, and one transaction sums them up.
        for age in reversed(range(self._rollup_days)):
            self._parts.append(partial(self._compare_rollups, day_of(utc_now()) - age * DAY))

    async def _find_accounts(self, bucket: int) -> None:
        names = await self._executor.execute_command("SMEMBERS", keys.accounts(bucket))
        holders = await self._holders(bucket, [name.decode() for name in names])
        self._parts.extendleft(partial(self._compare, bucket, holder) for holder in holders)

    async def _audit_reservations(self, bucket: int) -> None:
        audit = await self._store.audit_open(bucket)
        self._report.corrected_reservations += audit.corrected_subjects
        self._report.forgotten_requests += audit.orphaned_requests

    async def _compare_rollups(self, day: datetime) -> None:
        rollups = Rollups(self._database)
        wrong = await rollups.wrong_hours(since=day, until=min(day + DAY, utc_now()))
        if not wrong:
            return
        async with self._database.writing() as transaction:
            await LedgerStore(transaction).mark_dirty(wrong)
        await rollups.make_all()
        self._report.wrong_hours += wrong

    async def _holders(self, bucket: int, subjects: Sequence[str]) -> list[_Holder]:
        """Return the holders of these names, without those that the database does not have."""
        if not subjects:
            return []
        holders: list[_Holder] = []
        async with self._database.reading() as transaction:
            for scope, (id_column, tenant_column) in _TENANTS.items():
                kind = subject_of(scope, "")
                ids = [name.removeprefix(kind) for name in subjects if name.startswith(kind)]
                query = select(tenant_column, id_column).where(id_column.in_(ids))
                holders += [
                    _Holder(tenant_id, SubjectLimits(scope, id_, Limits()))
                    for tenant_id, id_ in await transaction.execute(query.order_by(id_column))
                ]
            ids = [name.removeprefix(SPENDING) for name in subjects if name.startswith(SPENDING)]
            spending = await spend_limits_of(transaction, SpendLimitRow.id.in_(ids))
            now_ms = to_ms(utc_now())
            holders += [_Holder(each.tenant_id, each.subject_at(now_ms)) for each in spending]
        return [each for each in holders if keys.bucket_of(each.tenant_id) == bucket]

    async def _compare(self, bucket: int, holder: _Holder) -> None:
        if holder.limits.has_credit and await correct(self._database, holder.tenant_id):
            self._report.wrong_balances.append(holder.tenant_id)
        seen: list[dict[str, int]] = []
        for _ in range(MOST_LOOKS):
            counters = await self._counters(bucket, holder)
            if counters is None:
                return
            differences = await self._differences(holder, counters)
            if not differences:
                self._report.compared_accounts += 1
                return
            seen.append({each.number: each.redis - each.ledger for each in differences})
            if len(seen) >= LOOKS and all(each == seen[-1] for each in seen[-LOOKS:]):
                await self._heal(holder, differences)
                return
            await asyncio.sleep(PAUSE_SECONDS)
        self._report.busy_accounts += 1

    async def _heal(self, holder: _Holder, differences: list[Difference]) -> None:
        await self._store.unseed(holder.tenant_id, holder.subject)
        self._report.compared_accounts += 1
        self._report.differences += differences

    async def _counters(self, bucket: int, holder: _Holder) -> _Counters | None:
        """Return the counters; None if not seeded, or with too many undrained records."""
        # Both keys are in one bucket: a transaction reads them at the same moment.
        pipeline = self._redis.pipeline(transaction=True)
        account = keys.account(bucket, holder.subject)
        fields = "seeded", counters.FIELD, counters.AUDIO_FIELD
        pipeline.execute_command("HMGET", account, *fields)
        pipeline.execute_command("XRANGE", keys.usage(bucket), "-", "+", "COUNT", MOST_UNDRAINED)
        (seeded, packed, audio), entries = await pipeline.execute()
        if seeded is None or packed is None or len(entries) == MOST_UNDRAINED:
            return None
        numbers = AccountNumbers.decode(packed, audio)
        return _Counters(numbers, list(_records_of(holder, entries)))

    async def _differences(self, holder: _Holder, counters: _Counters) -> list[Difference]:
        period = _period_of(holder.limits, counters.numbers.month)
        if period is None:
            return []  # No request of the current window has been admitted yet.
        derived = await self._derive(holder, counters, period)
        values = [
            (number, getattr(counters.numbers, field), getattr(derived, field))
            for number, field in _NUMBERS.items()
        ]
        return [
            Difference(
                tenant_id=holder.tenant_id,
                subject=holder.subject,
                number=number,
                redis=redis,
                ledger=ledger,
            )
            for number, redis, ledger in values
            if None not in (redis, ledger) and redis != ledger
        ]

    async def _derive(self, holder: _Holder, counters: _Counters, period: Period) -> AccountNumbers:
        """Return the correct values of the counters, for their day and period."""
        day = counters.numbers.day
        balances = await read_balances(
            self._database,
            holder.tenant_id,
            holder.limits,
            day_start_ms=day * DAY_MS,
            period=period,
            request_ids={record.request_id for record in counters.undrained},
        )
        return balances.plus(counters.undrained, day=day, period=period)


def _period_of(subject: SubjectLimits, number: int) -> Period | None:
    """Return the period with the number that an account has; None if it is over, and unknown."""
    start = datetime.fromtimestamp(number, UTC)
    if subject.spending is None:
        start = datetime(number // 100, number % 100, 1, tzinfo=UTC)
    period = period_of(subject, to_ms(start))
    return period if period is not None and period.number == number else None


def _records_of(
    holder: _Holder, entries: Sequence[tuple[bytes, Mapping[bytes, bytes]]]
) -> Iterator[UsageRecord]:
    for _, fields in entries:
        record = readable_usage(fields.get(FIELD))
        if record is not None and holder.owns(record):
            yield record
