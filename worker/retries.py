"""Retries with exponential backoff while Redis is unavailable."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from redis.exceptions import RedisError

from contract.tasks import Backoff

_log = logging.getLogger(__name__)

_FIRST_PAUSE_SECONDS = 0.05
_LONGEST_PAUSE_SECONDS = 1.0


class Retries:
    """Pauses between retries of an action; logs the first failure of a series and the recovery."""

    def __init__(self, action: str) -> None:
        self._action = action
        self._backoff = Backoff(_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS)

    async def pause(self, error: Exception) -> None:
        """Wait before the next attempt."""
        if not self._backoff.last_seconds:
            _log.warning("Could not %s, retrying: %s", self._action, error)
        await asyncio.sleep(self._backoff.next_seconds())

    def recovered(self) -> None:
        """Reset the backoff after a success."""
        if self._backoff.last_seconds:
            _log.info("Recovered: %s", self._action)
            self._backoff.reset()


async def repeat(name: str, action: Callable[[], Awaitable[None]]) -> None:
    """Repeat an action until cancelled, retrying after Redis errors."""
    retries = Retries(name)
    while True:
        try:
            await action()
            retries.recovered()
        except (RedisError, OSError) as error:
            await retries.pause(error)
