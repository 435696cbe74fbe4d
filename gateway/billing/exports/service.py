"""Exports: show, pause and repair the export of the ledger to billing systems."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Final

from gateway.accounts.audit.log import SYSTEM
from gateway.accounts.changes import Change, changing
from gateway.billing.exports.store import ExportState, ExportStore
from gateway.platform.database.engine import Database
from gateway.platform.database.tables import ExportBatchRow, ExportBatchState
from gateway.records.checks import check_known
from gateway.records.errors import NotFoundError, shown
from gateway.records.times import utc_now

MAX_BATCHES: Final = 100
"""Batches of one page."""

_STOPPED: Final = (ExportBatchState.REJECTED, ExportBatchState.UNCERTAIN)


class ExportService:
    """The sinks, and the batches that they have not confirmed."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def list_all(self) -> list[ExportState]:
        """Return the states of all sinks that `sluice jobs` has served, by name."""
        async with self._database.reading() as transaction:
            return await ExportStore(transaction).states()

    async def batches(
        self,
        name: str,
        state: ExportBatchState | None = None,
        *,
        after: int = 0,
        limit: int = MAX_BATCHES,
    ) -> list[ExportBatchRow]:
        """Return the batches of a sink, oldest first. Raises NotFoundError."""
        check_known(name, "sink")
        async with self._database.reading() as transaction:
            store = ExportStore(transaction)
            if not await store.has_sink(name):
                raise _no_sink(name)
            return await store.batches(name, state, after=after, limit=limit)

    async def pause(self, name: str, *, actor: str = SYSTEM) -> None:
        """Send nothing more to the sink; a request that is under way ends."""
        await self._set_paused(name, utc_now(), "export.pause", actor)

    async def resume(self, name: str, *, actor: str = SYSTEM) -> None:
        """Send again from where the sink was paused or has failed, at once."""
        await self._set_paused(name, None, "export.resume", actor)

    async def retry(self, name: str, batch_id: int | None = None, *, actor: str = SYSTEM) -> int:
        """Send a batch again that is rejected or uncertain; without an id, all rejected ones.

        Return how many. Raises NotFoundError if there is no such batch.
        """
        states = _STOPPED if batch_id is not None else (ExportBatchState.REJECTED,)
        async with self._changing(name, actor) as (change, store):
            number = await store.retry(name, states, utc_now(), batch_id)
            if batch_id is not None and not number:
                raise _no_batch(batch_id)
            await change.audit("export.retry", name, {"batch": batch_id, "batches": number})
        return number

    async def discard(self, name: str, batch_id: int, *, actor: str = SYSTEM) -> None:
        """Never send a batch that is rejected or uncertain. Raises NotFoundError."""
        async with self._changing(name, actor) as (change, store):
            row = await store.discard(name, _STOPPED, batch_id)
            if row is None:
                raise _no_batch(batch_id)
            details = {"batch": batch_id, "event": row.identifier, "cost_micros": row.cost_micros}
            await change.audit("export.discard", name, details, tenant_id=row.tenant_id)

    async def remove(self, name: str, *, actor: str = SYSTEM) -> None:
        """Remove the sink with its batches. If it is still configured, it begins anew."""
        async with self._changing(name, actor) as (change, store):
            await store.remove(name)
            await store.remove_exported()
            await change.audit("export.remove", name)

    async def _set_paused(
        self, name: str, paused_at: datetime | None, action: str, actor: str
    ) -> None:
        async with self._changing(name, actor) as (change, store):
            await store.set_paused(name, paused_at)
            await change.audit(action, name)

    @asynccontextmanager
    async def _changing(self, name: str, actor: str) -> AsyncIterator[tuple[Change, ExportStore]]:
        """Open the unit of work of a change of a sink, which is locked meanwhile."""
        check_known(name, "sink")
        async with changing(self._database, actor=actor) as change:
            store = ExportStore(change.transaction)
            if await store.lock_sink(name) is None:
                raise _no_sink(name)
            yield change, store


def _no_sink(name: str) -> NotFoundError:
    return NotFoundError(f"There is no sink {shown(name)}.")


def _no_batch(batch_id: int) -> NotFoundError:
    return NotFoundError(f"There is no rejected or uncertain batch {batch_id}.")
