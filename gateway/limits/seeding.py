"""Derive a subject's durable counters from the ledger and from usage records not in it yet.

The order of reads makes the sum exact. Every settlement of a subject increases the version of its
counters. Anything settled before the version is read is therefore already in the stream or in the
ledger. If anything is settled later, the version differs and the counters are not written.
"""

import asyncio
import operator
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from redis.exceptions import RedisError

from common.tasks import jittered
from contract import keys
from gateway.limits.counters import (
    ACCOUNT_MS,
    AccountNumbers,
    Period,
    day_of,
    day_start_ms,
    period_of,
)
from gateway.limits.replies import SubjectStatus
from gateway.limits.store import QuotaStore
from gateway.records.errors import StoreUnavailableError
from gateway.records.limits import SubjectLimits
from gateway.records.usage_record import UsageRecord

MOST_TRIES: Final = 20
"""Maximum attempts until the counters of a subject are stable.

Until they are known, no new request is admitted, so they become stable.
"""
PAUSE_SECONDS: Final = 0.1
"""The longest pause between two attempts."""
RETRY_AFTER_SECONDS: Final = 1.0


class Recorded(NamedTuple):
    """The usage of one request in the ledger."""

    tokens: int = 0
    audio_seconds: int = 0
    cost_micros: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Balances:
    """A subject's usage in the ledger: requests count for the day and month of their admission."""

    requests_today: int
    tokens_today: int
    audio_seconds_today: int
    cost_this_month: int
    credit_micros: int | None
    """Credits granted minus the cost of all prepaid requests; None unless the subject is a tenant.
    """
    known: Mapping[str, Recorded]
    """Those of the given request ids that are in the ledger, and therefore in these sums."""

    def plus(self, undrained: Iterable[UsageRecord], *, day: int, period: Period) -> AccountNumbers:
        """Return the numbers of a day and a period with the records that are not in the ledger.

        Several records of a request count as much as the largest, as in the ledger.
        """
        requests, tokens = self.requests_today, self.tokens_today
        seconds, cost, credit = self.audio_seconds_today, self.cost_this_month, self.credit_micros
        known = dict(self.known)
        for record in undrained:
            is_today = day_of(record.created_ms) == day
            requests += is_today and record.request_id not in known
            before = known.get(record.request_id, Recorded())
            used = Recorded(
                record.prompt_tokens + record.completion_tokens,
                record.audio_seconds,
                record.cost_micros,
            )
            known[record.request_id] = most = Recorded(*map(max, before, used))
            more = Recorded(*map(operator.sub, most, before))
            if is_today:
                tokens += more.tokens
                seconds += more.audio_seconds
            if period.contains(record.created_ms):
                cost += more.cost_micros
            if credit is not None and record.is_prepaid:
                credit -= more.cost_micros
        return AccountNumbers(
            day=day,
            month=period.number,
            requests=requests,
            tokens=tokens,
            audio_seconds=seconds,
            cost_micros=cost,
            credit_micros=credit,
        )


ReadBalances = Callable[..., Awaitable[Balances]]
"""`gateway.billing.ledger.store.read_balances` for a database.

Its parameters are the tenant, the subject, the start of a day as Unix time in milliseconds, a
period, and request ids. Raises StoreUnavailableError if the database is unreachable.
"""


def _is_seed_needed(subject: SubjectLimits, status: SubjectStatus, *, is_prepaid: bool) -> bool:
    has_credit = is_prepaid and subject.has_credit
    if has_credit and status.credit_micros is None:
        return True
    return (has_credit or subject.limits.is_durable) and not status.is_seeded


class Seeder:
    """Seeds subjects; one task per subject, no matter how many requests wait for it."""

    def __init__(self, store: QuotaStore, read_balances: ReadBalances) -> None:
        self._store = store
        self._read_balances = read_balances
        self._running: dict[tuple[str, str], asyncio.Task[None]] = {}

    async def seed(self, tenant_id: str, subjects: Collection[SubjectLimits]) -> None:
        """Write the durable counters of subjects of one tenant to Redis.

        Raises StoreUnavailableError if Redis or the database is unreachable, or the counters keep
        changing.
        """
        tasks = [self._task_of(tenant_id, subject) for subject in subjects]
        # A cancelled request must not cancel the task, because other requests may wait for it.
        await asyncio.gather(*(asyncio.shield(task) for task in tasks))

    async def statuses(
        self, tenant_id: str, subjects: Sequence[SubjectLimits], *, is_prepaid: bool = False
    ) -> list[SubjectStatus]:
        """Return the usage of subjects, first derived from the ledger where Redis lacks it.

        Raises RedisError and StoreUnavailableError.
        """
        if not subjects:
            return []
        statuses = await self._store.status(tenant_id, subjects)
        unknown = [
            subject
            for subject, status in zip(subjects, statuses, strict=True)
            if _is_seed_needed(subject, status, is_prepaid=is_prepaid)
        ]
        if not unknown:
            return statuses
        await self.seed(tenant_id, unknown)
        return await self._store.status(tenant_id, subjects)

    def _task_of(self, tenant_id: str, subject: SubjectLimits) -> asyncio.Task[None]:
        key = (tenant_id, subject.subject)
        task = self._running.get(key)
        if task is None:
            task = asyncio.create_task(self._seed(tenant_id, subject))
            self._running[key] = task
            task.add_done_callback(lambda done: self._end(key, done))
        return task

    def _end(self, key: tuple[str, str], task: asyncio.Task[None]) -> None:
        del self._running[key]
        if not task.cancelled():
            # Retrieve the exception, or asyncio logs it if every waiting request was cancelled.
            task.exception()

    async def _seed(self, tenant_id: str, subject: SubjectLimits) -> None:
        try:
            for _ in range(MOST_TRIES):
                if await self._try(tenant_id, subject):
                    return
                await asyncio.sleep(jittered(PAUSE_SECONDS))
        except RedisError:
            raise StoreUnavailableError(
                "The limits cannot be checked.", retry_after_seconds=RETRY_AFTER_SECONDS
            ) from None
        raise StoreUnavailableError(
            "The limits cannot be checked because their usage keeps changing.",
            retry_after_seconds=RETRY_AFTER_SECONDS,
        )

    async def _try(self, tenant_id: str, subject: SubjectLimits) -> bool:
        """Return whether the subject is seeded, by this process or another."""
        (status,) = await self._store.status(tenant_id, [subject])
        period = period_of(subject, status.now_ms)
        if period is None:
            raise StoreUnavailableError(
                "The limits cannot be checked: the clocks of this gateway and of Redis differ.",
                retry_after_seconds=RETRY_AFTER_SECONDS,
            )
        if status.is_seeded and (not subject.has_credit or status.credit_micros is not None):
            return True
        undrained = await self._undrained(tenant_id, subject)
        balances = await self._read_balances(
            tenant_id,
            subject,
            day_start_ms=day_start_ms(status.now_ms),
            period=period,
            request_ids={record.request_id for record in undrained},
        )
        numbers = balances.plus(undrained, day=day_of(status.now_ms), period=period)
        stays_ms = ACCOUNT_MS
        if subject.spending is not None:
            stays_ms = subject.spending.bounds.after * 1000 - status.now_ms
        return await self._store.seed(
            tenant_id, subject, numbers, version=status.version, stays_ms=stays_ms
        )

    async def _undrained(self, tenant_id: str, subject: SubjectLimits) -> list[UsageRecord]:
        """Return the records that may not be in the ledger."""
        bucket, found = keys.bucket_of(tenant_id), list[UsageRecord]()
        after: str | None = "-"
        while after is not None:
            records, after = await self._store.undrained(bucket, after=after)
            found += (
                record
                for record in records
                if record.tenant_id == tenant_id and record.counts_for(subject)
            )
        return found
