"""In-memory copy of a table, so that requests need no query."""

import asyncio
import logging
from abc import ABC, abstractmethod
from typing import Final

from gateway.records.errors import StoreUnavailableError

REFRESH_SECONDS: Final = 60.0
RETRY_SECONDS: Final = 1.0
"""Interval between attempts to load the table while loading fails."""

logger = logging.getLogger(__name__)


class TableCopy(ABC):
    """A copy of a table: the last one that was loaded."""

    def __init__(self, table: str) -> None:
        self._table = table
        self._is_outdated = asyncio.Event()

    @abstractmethod
    async def refresh(self) -> None:
        """Reload the table. Raises StoreUnavailableError, and then keeps the old copy."""

    def refresh_soon(self) -> None:
        """Reload the table at once, because it has changed or may have changed."""
        self._is_outdated.set()

    async def run(self) -> None:
        """Reload the table whenever it has changed, and every minute, until cancelled."""
        while True:
            # Clear the flag before the read: a change during the read then triggers another one.
            self._is_outdated.clear()
            try:
                await self.refresh()
            except StoreUnavailableError:
                logger.warning(
                    "cannot read the table %s; the previous one remains in use", self._table
                )
                await asyncio.sleep(RETRY_SECONDS)
            else:
                await self._wait()

    async def _wait(self) -> None:
        try:
            async with asyncio.timeout(REFRESH_SECONDS):
                await self._is_outdated.wait()
        except TimeoutError:
            pass
