"""In-memory copy of all adapters that are ready, so that choosing one needs no query."""

import asyncio
import logging
from collections import defaultdict
from typing import Final

from sqlalchemy import select

from gateway.database.engine import Database
from gateway.database.tables import AdapterRow
from gateway.errors import StoreUnavailableError
from gateway.tenancy.adapters import Adapter, AdapterState

REFRESH_SECONDS: Final = 60.0
RETRY_SECONDS: Final = 1.0
"""Interval between attempts to load the table while loading fails."""

logger = logging.getLogger(__name__)

_READY: Final = (
    select(AdapterRow)
    .where(AdapterRow.state == AdapterState.READY)
    .order_by(AdapterRow.created_at, AdapterRow.id)
)


class AdapterBook:
    """A copy of the adapters that are ready: the last one that was loaded."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._own: dict[str, dict[str, Adapter]] = {}
        self._shared: dict[str, Adapter] = {}
        self._is_outdated = asyncio.Event()

    def find(self, tenant_id: str, name: str) -> Adapter | None:
        """Return the tenant's own adapter with this name, else the shared one."""
        own = self._own.get(tenant_id)
        return (own and own.get(name)) or self._shared.get(name)

    def visible_to(self, tenant_id: str) -> list[Adapter]:
        """Return the adapters that a tenant may use by their names."""
        return list((self._shared | self._own.get(tenant_id, {})).values())

    def refresh_soon(self) -> None:
        """Reload the table at once, because it has changed or may have changed."""
        self._is_outdated.set()

    async def refresh(self) -> None:
        """Reload the table. Raises StoreUnavailableError, and then keeps the old copy."""
        async with self._database.reading() as transaction:
            adapters = [row.to_record() for row in await transaction.scalars(_READY)]
        own: defaultdict[str, dict[str, Adapter]] = defaultdict(dict)
        for adapter in adapters:
            own[adapter.tenant_id][adapter.name] = adapter
        self._own = dict(own)
        self._shared = {each.name: each for each in reversed(adapters) if each.is_shared}

    async def run(self) -> None:
        """Reload the table whenever it has changed, and every minute, until cancelled."""
        while True:
            # Clear the flag before the read: a change during the read then triggers another one.
            self._is_outdated.clear()
            try:
                await self.refresh()
            except StoreUnavailableError:
                logger.warning("cannot read the adapters; the previous ones remain in use")
                await asyncio.sleep(RETRY_SECONDS)
            else:
                await self._wait()

    async def _wait(self) -> None:
        try:
            async with asyncio.timeout(REFRESH_SECONDS):
                await self._is_outdated.wait()
        except TimeoutError:
            pass
