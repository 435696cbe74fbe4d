"""Retries with exponential backoff, while Redis is unavailable and after bugs."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from redis.exceptions import RedisError

from common.tasks import Backoff

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
        if not isinstance(error, (RedisError, OSError)):
            _log.error("Could not %s, retrying", self._action, exc_info=error)
        elif not self._backoff.last_seconds:
            _log.warning("Could not %s, retrying: %s", self._action, error)
        await asyncio.sleep(self._backoff.next_seconds())

    def recovered(self) -> None:
        """Reset the backoff after a success."""
        if self._backoff.last_seconds:
            _log.info("Recovered: %s", self._action)
            self._backoff.reset()


async def repeat(
    name: str,
    action: Callable[[], Awaitable[None]],
    *,
    on_bug: Callable[[Exception], Awaitable[None]] | None = None,
) -> None:
    """Repeat an action until cancelled, retrying after errors.

    `on_bug` is called with each error that is not one of Redis. It may raise to end the loop.
    """
    retries = Retries(name)
    while True:
        try:
            await action()
            retries.recovered()
        except Exception as error:  # A loop must not end for one bad item.
            if on_bug is not None and not isinstance(error, (RedisError, OSError)):
                await on_bug(error)
            await retries.pause(error)
