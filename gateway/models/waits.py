"""The longest wait of a job in each hour of the last day, for the operators' first page."""

import asyncio
from typing import Final

from common import clock
from common.tasks import repeat
from contract import keys
from contract.scripts import CommandExecutor
from gateway.models.catalogue import Catalogue

HOURS: Final = 24
"""Hours that are kept, the current one included."""
NOTE_SECONDS: Final = 2.0
_HOUR_SECONDS: Final = 3600


class LongestWaits:
    """The longest waits that any gateway has seen. Reading and writing raise RedisError."""

    def __init__(self, executor: CommandExecutor, catalogue: Catalogue) -> None:
        self._executor = executor
        self._catalogue = catalogue

    async def run(self) -> None:
        """Note waits until cancelled."""
        await repeat("note the longest waits", self.note, seconds=NOTE_SECONDS)

    async def note(self) -> None:
        """Note for how long the oldest job of each model has waited."""
        key = _key(clock.now_seconds() // _HOUR_SECONDS)
        waits = {
            each.card.model: ms
            for each in self._catalogue.models
            if (ms := int(1000 * each.status.oldest_wait_seconds))
        }
        if waits:
            entries = (part for model, ms in waits.items() for part in (ms, model))
            await self._executor.execute_command("ZADD", key, "GT", *entries)
            await self._executor.execute_command("EXPIRE", key, (HOURS + 1) * _HOUR_SECONDS)

    async def of_last_day(self) -> dict[str, int]:
        """Return the longest wait of each model in milliseconds; models without one are absent."""
        hour = clock.now_seconds() // _HOUR_SECONDS
        found: list[list[tuple[bytes, float]]] = await asyncio.gather(
            *(
                self._executor.execute_command("ZRANGE", _key(hour - age), 0, -1, "WITHSCORES")
                for age in range(HOURS)
            )
        )
        longest: dict[str, int] = {}
        for model, ms in (entry for entries in found for entry in entries):
            name = model.decode()
            longest[name] = max(longest.get(name, 0), int(ms))
        return longest


def _key(hour: int) -> str:
    return keys.period_counts("waits", "hour", hour)
