"""Counts of the last hours and days, for operators: rejected requests, and requests by alias.

Metrics belong to one process. These counts include all gateways, each of which adds its own once a
second. Served requests that name a model directly, without an alias, are not counted. A gateway
that dies loses its counts of the last second.
"""

import asyncio
from collections import Counter
from enum import Enum
from typing import Final, NamedTuple

from common import clock
from common.tasks import repeat
from contract import keys
from contract.scripts import CommandExecutor

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
    """Counts what happens, and reads the counts of all gateways. Reading raises RedisError."""

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
