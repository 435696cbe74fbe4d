"""Retries with exponential backoff while Redis is unavailable."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from redis.exceptions import RedisError

_log = logging.getLogger(__name__)

_FIRST_PAUSE_SECONDS = 0.05
_LONGEST_PAUSE_SECONDS = 1.0


class Backoff:
    """Exponential backoff that logs the first failure of a series and the recovery."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._pause_seconds = 0.0

    async def pause(self, error: Exception) -> None:
        """Wait before the next attempt."""
        if not self._pause_seconds:
            _log.warning("Could not %s, retrying: %s", self._what, error)
        doubled = max(2 * self._pause_seconds, _FIRST_PAUSE_SECONDS)
        self._pause_seconds = min(doubled, _LONGEST_PAUSE_SECONDS)
        await asyncio.sleep(self._pause_seconds)

    def recovered(self) -> None:
        """Reset the backoff after a success."""
        if self._pause_seconds:
            _log.info("Recovered: %s", self._what)
            self._pause_seconds = 0.0


async def keep_doing(what: str, action: Callable[[], Awaitable[None]]) -> None:
    """Repeat an action until cancelled, retrying after Redis errors."""
    backoff = Backoff(what)
    while True:
        try:
            await action()
            backoff.recovered()
        except (RedisError, OSError) as error:
            await backoff.pause(error)


async def until_done(what: str, action: Callable[[], Awaitable[None]]) -> None:
    """Run an action once, retrying until Redis accepts it."""
    backoff = Backoff(what)
    while True:
        try:
            await action()
            backoff.recovered()
            return
        except (RedisError, OSError) as error:
            await backoff.pause(error)
