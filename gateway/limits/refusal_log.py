"""Requests that are refused before any work: the one place that records them, for four readers.

- Metrics: refused requests by code and model, of one process.
- Operators: refused requests by tenant and code, of the last hours and days (`PeriodCounts`).
- Customers: the latest requests and lines of batches that were rejected (`Refusal`).
- The status page: what the service refused through its own fault, in SQL.

A gateway counts, and writes its counts once a second, so that a client that retries without a pause
costs no command for each refusal. Counts of the last second are lost with their gateway. While SQL
is unavailable, the gateway keeps its counts; they count twice if SQL accepts them but its reply is
lost.
"""

import asyncio
import logging
from collections import Counter
from datetime import datetime
from enum import Enum
from typing import Final, NamedTuple

import msgspec
from sqlalchemy.dialects import postgresql, sqlite

from common import clock
from common.tasks import repeat
from contract import keys
from contract.scripts import CommandExecutor
from gateway.platform import telemetry
from gateway.platform.database.engine import Database
from gateway.platform.database.tables import RejectionRow
from gateway.records.errors import (
    ApiError,
    InsufficientQuotaError,
    InternalError,
    RateLimitError,
    StoreUnavailableError,
    UnservedModelError,
)
from gateway.records.times import hour_of, utc_now
from gateway.records.usage_record import UsageRecord

FLUSH_SECONDS: Final = 1.0
MOST_PENDING: Final = 10_000
"""Counts that a gateway holds; further ones of that second are dropped."""
MOST_READ: Final = 1_000
"""Counts of one hour or day that are read: the largest ones."""
_HOUR_SECONDS: Final = 3600
_SEPARATOR: Final = "\n"
"""Between the names of what is counted, which have no control characters."""


class Period(Enum):
    """The periods that are counted, and how many of them are kept."""

    HOUR = (_HOUR_SECONDS, 24)
    DAY = (24 * _HOUR_SECONDS, 7)

    def __init__(self, seconds: int, kept: int) -> None:
        self.seconds = seconds
        self.kept = kept


class Totals(NamedTuple):
    """Sums over the kept periods, the current one included."""

    counts: Counter[tuple[str, ...]]
    is_complete: bool
    """False if a period has more than `MOST_READ` counts, of which the smallest are missing."""


class PeriodCounts:
    """Counts of the last hours and days, which include all gateways. Reading raises RedisError.

    Served requests that name a model directly, without an alias, are not counted.
    """

    def __init__(self, executor: CommandExecutor) -> None:
        self._executor = executor
        self._pending: Counter[tuple[str, str]] = Counter()

    def refused(self, tenant_id: str, code: str) -> None:
        """Count a request that is rejected with an error code; of no tenant if it is unknown."""
        self._add("refused", tenant_id, code)
        if tenant_id:
            self._add(f"refused:{tenant_id}", code)

    def alias_admitted(self, alias: str, model: str) -> None:
        """Count an admitted request for an alias."""
        self._add("aliases", alias, model)

    async def refusals(self, period: Period, *, tenant_id: str | None = None) -> Totals:
        """Return rejected requests by tenant and code, or of one tenant by code."""
        return await self._read("refused" if tenant_id is None else f"refused:{tenant_id}", period)

    async def aliases(self, period: Period) -> Totals:
        """Return admitted requests by alias and model."""
        return await self._read("aliases", period)

    async def run(self) -> None:
        """Write the counts each second until cancelled."""
        await repeat("write counts of requests", self.flush, seconds=FLUSH_SECONDS)

    async def flush(self) -> None:
        """Write the counts, which are dropped if that fails. Raises RedisError."""
        pending, self._pending = self._pending, Counter()
        now = clock.now_seconds()
        execute = self._executor.execute_command
        for period in Period:
            number = now // period.seconds
            names = {series: _key(series, period, number) for series, _ in pending}
            await asyncio.gather(
                *(
                    execute("ZINCRBY", names[series], count, member)
                    for (series, member), count in pending.items()
                )
            )
            lifetime = (period.kept + 1) * period.seconds
            await asyncio.gather(*(execute("EXPIRE", key, lifetime) for key in names.values()))

    def _add(self, series: str, *names: str) -> None:
        key = series, _SEPARATOR.join(names)
        if key in self._pending or len(self._pending) < MOST_PENDING:
            self._pending[key] += 1

    async def _read(self, series: str, period: Period) -> Totals:
        number = clock.now_seconds() // period.seconds
        # One more than is used shows whether there are more.
        found: list[list[tuple[bytes, float]]] = await asyncio.gather(
            *(
                self._executor.execute_command(
                    "ZREVRANGE", _key(series, period, number - age), 0, MOST_READ, "WITHSCORES"
                )
                for age in range(period.kept)
            )
        )
        counts: Counter[tuple[str, ...]] = Counter()
        for entries in found:
            for member, count in entries[:MOST_READ]:
                counts[tuple(member.decode().split(_SEPARATOR))] += int(count)
        is_complete = all(len(entries) <= MOST_READ for entries in found)
        return Totals(counts, is_complete)


def _key(series: str, period: Period, number: int) -> str:
    return keys.period_counts(series, period.name.lower(), number)


KEPT: Final = 100
"""Latest refusals for each tenant."""
KEPT_SECONDS: Final = 7 * 24 * 3600
_OUR_FAULT: Final = 500
"""The lowest status of failures of the service."""

logger = logging.getLogger(__name__)


class Refusal(msgspec.Struct, frozen=True):
    """Equal rejections of one credential within a second, by a limit or for another reason."""

    at_ms: int
    """Unix time of the first one."""
    credential_id: str
    project_id: str | None
    model: str
    code: str
    limit: str
    """Empty if no limit is the reason, as is the scope."""
    scope: str
    message: str
    """What the first client received; without the value that it had given."""
    times: int = 1
    status: int = 429


class Refusals:
    """Records refused requests, and reads the latest ones."""

    def __init__(self, database: Database, executor: CommandExecutor, counts: PeriodCounts) -> None:
        self._database = database
        self._executor = executor
        self._counts = counts
        self._latest: dict[tuple[str, str, str, str], Refusal] = {}
        self._faults: Counter[tuple[datetime, str]] = Counter()

    def by_limit(self, record: UsageRecord, error: RateLimitError | InsufficientQuotaError) -> None:
        """Record that a limit rejected a request or a line of a batch."""
        if (refusing := error.refusing) is not None:
            who = record.tenant_id, record.credential_id, record.project_id
            self._keep(error, who, record.model, limit=refusing.limit, scope=refusing.scope)

    def of_request(
        self,
        error: BaseException,
        *,
        tenant_id: str,
        model: str,
        credential_id: str = "",
        project_id: str | None = None,
    ) -> None:
        """Record that a request is refused before any work.

        Args:
            error: the error that the client gets; others than ApiError become InternalError.
            tenant_id: empty if the caller is not known.
            credential_id: likewise.
            project_id: the project of the credential.
            model: the model of a request that is valid, else empty.
        """
        unserved = error.model if isinstance(error, UnservedModelError) else None
        is_fault = isinstance(error, Exception)
        if isinstance(error, ApiError):
            is_fault = error.status >= _OUR_FAULT and not error.is_recorded
            if credential_id and not getattr(error, "refusing", None):
                self._keep(error, (tenant_id, credential_id, project_id), model)
            if not isinstance(error, InternalError):
                telemetry.REFUSED_REQUESTS.labels(error.code, unserved or "").inc()
                self._counts.refused(tenant_id, error.code)
        if is_fault:
            self._faults[hour_of(utc_now()), model if unserved is None else unserved] += 1

    def _keep(
        self,
        error: ApiError,
        who: tuple[str, str, str | None],
        model: str,
        *,
        limit: str = "",
        scope: str = "",
    ) -> None:
        tenant_id, credential_id, project_id = who
        key = tenant_id, credential_id, scope or error.code, limit or error.param or ""
        if (known := self._latest.get(key)) is not None:
            self._latest[key] = msgspec.structs.replace(known, times=known.times + 1)
        elif len(self._latest) < MOST_PENDING:
            self._latest[key] = Refusal(
                at_ms=clock.now_ms(),
                credential_id=credential_id,
                project_id=project_id,
                model=model,
                code=error.code,
                limit=limit,
                scope=scope,
                message=error.message.partition(" Given: ")[0],
                status=error.status,
            )

    async def run(self) -> None:
        """Write what was recorded each second until cancelled. Neither store delays the other."""
        await asyncio.gather(
            repeat("write rejected requests", self.write_latest, seconds=FLUSH_SECONDS),
            repeat("write rejected requests", self.write_faults, seconds=FLUSH_SECONDS),
        )

    async def write_latest(self) -> None:
        """Write the refusals to Redis. They are dropped if that fails.

        Raises RedisError.
        """
        latest, self._latest = self._latest, {}
        by_key: dict[str, list[bytes]] = {}
        for (tenant_id, *_), refusal in latest.items():
            # Requests that are wrong in themselves do not displace what limits have rejected.
            key = keys.refusals(tenant_id) if refusal.limit else keys.rejected(tenant_id)
            by_key.setdefault(key, []).append(msgspec.msgpack.encode(refusal))
        for key, entries in by_key.items():
            await self._executor.execute_command("LPUSH", key, *entries[:KEPT])
            await self._executor.execute_command("LTRIM", key, 0, KEPT - 1)
            await self._executor.execute_command("EXPIRE", key, KEPT_SECONDS)

    async def latest(
        self,
        tenant_id: str,
        *,
        credential_id: str | None = None,
        project_id: str | None = None,
        by_limits: bool = True,
    ) -> list[Refusal]:
        """Return the latest rejections of a tenant by limits, or all others, newest first.

        With a credential or project, only those of it. Raises RedisError.
        """
        key = keys.refusals(tenant_id) if by_limits else keys.rejected(tenant_id)
        found: list[bytes] = await self._executor.execute_command("LRANGE", key, 0, KEPT - 1)
        entries = [msgspec.msgpack.decode(each, type=Refusal) for each in found]
        return [
            each
            for each in entries
            if credential_id in (None, each.credential_id) and project_id in (None, each.project_id)
        ]

    async def write_faults(self) -> None:
        """Add what the service refused to the counts in SQL, or keep it if SQL is unavailable."""
        if not self._faults:
            return
        faults, self._faults = self._faults, Counter()
        try:
            async with self._database.writing() as transaction:
                dialect = transaction.get_bind().dialect.name
                insert = (postgresql if dialect == "postgresql" else sqlite).insert(RejectionRow)
                # Sorted, so that two gateways wait for each other without deadlock.
                for (hour, model), requests in sorted(faults.items()):
                    row = {"hour": hour, "model": model, "requests": requests}
                    await transaction.execute(
                        insert.values(row).on_conflict_do_update(
                            index_elements=[RejectionRow.hour, RejectionRow.model],
                            set_={"requests": RejectionRow.requests + requests},
                        )
                    )
        except StoreUnavailableError as error:
            self._faults.update(faults)
            logger.warning("cannot write rejected requests: %s", error)
