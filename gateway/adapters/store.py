"""Queries on the table `adapters`."""

from collections.abc import Collection
from dataclasses import asdict
from datetime import datetime, timedelta
from typing import Final

from sqlalchemy import ColumnElement, and_, func, not_, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from gateway.platform.database.claims import lock_in_turns
from gateway.platform.database.paging import Page, PageRequest, find_record, read_page
from gateway.platform.database.tables import AdapterRow
from gateway.records.adapters import Adapter, AdapterState

AT_ONCE_OF_TENANT: Final = 2
"""Adapters of one tenant that a process validates at once."""
KEPT_AFTER_DELETION: Final = timedelta(days=1)
"""Time for which running requests may still need the files of a deleted adapter."""

_IS_LIVE = AdapterRow.state != AdapterState.DELETED
_HAS_ENDED = AdapterRow.state.in_((AdapterState.FAILED, AdapterState.DELETED))


class AdapterStore:
    """Adapters, within one transaction."""

    def __init__(self, transaction: AsyncSession) -> None:
        self._transaction = transaction

    async def add(self, adapter: Adapter, *, claimed_until: datetime) -> None:
        """Insert an adapter whose files are not copied yet."""
        self._transaction.add(
            AdapterRow(**asdict(adapter), is_stored=False, claimed_until=claimed_until)
        )
        await self._transaction.flush()

    async def find(self, tenant_id: str, id_or_name: str) -> Adapter | None:
        """Return a tenant's adapter that is not deleted."""
        return await find_record(
            self._transaction,
            AdapterRow,
            AdapterRow.tenant_id == tenant_id,
            or_(AdapterRow.id == id_or_name, AdapterRow.name == id_or_name),
            _IS_LIVE,
        )

    async def find_shared(self, name: str) -> Adapter | None:
        """Return the shared adapter with this name."""
        conditions = (AdapterRow.name == name, AdapterRow.is_shared, _IS_LIVE)
        return await find_record(self._transaction, AdapterRow, *conditions)

    async def count(self, tenant_id: str) -> int:
        """Return how many adapters of a tenant are not deleted."""
        query = select(func.count()).where(AdapterRow.tenant_id == tenant_id, _IS_LIVE)
        return await self._transaction.scalar(query) or 0

    async def page(self, tenant_id: str | None, wanted: PageRequest) -> Page[Adapter]:
        """Return a page of adapters that are not deleted: of a tenant, or of all tenants."""
        conditions: list[ColumnElement[bool]] = [_IS_LIVE]
        if tenant_id is not None:
            conditions.append(AdapterRow.tenant_id == tenant_id)
        return await read_page(self._transaction, AdapterRow, wanted, *conditions)

    async def delete(self, adapter_id: str, now: datetime) -> None:
        """Delete an adapter, which ends its claim."""
        row = await self._transaction.get_one(AdapterRow, adapter_id, with_for_update=True)
        row.state, row.deleted_at, row.claimed_until = AdapterState.DELETED, now, now
        await self._transaction.flush()

    async def is_being_removed(self, sha256: str, now: datetime) -> bool:
        """Return whether a process removes these files now. None begins during this transaction.

        The transaction must have noted that a live adapter has these files.
        """
        claims = await self._transaction.scalars(
            select(AdapterRow.claimed_until)
            .where(AdapterRow.sha256 == sha256, AdapterRow.is_stored, _HAS_ENDED)
            .with_for_update()
        )
        return any(until > now for until in claims)


async def lock_new(
    transaction: AsyncSession, now: datetime, limit: int, held: Collection[str]
) -> list[AdapterRow]:
    """Lock adapters to validate, in turns of their tenants; see `claiming`."""
    return await lock_in_turns(
        transaction,
        AdapterRow,
        is_due=and_(AdapterRow.state == AdapterState.VALIDATING, AdapterRow.claimed_until <= now),
        is_held=AdapterRow.id.in_(held),
        owners=(AdapterRow.tenant_id,),
        order=AdapterRow.claimed_until,
        limit=limit,
        most=(AT_ONCE_OF_TENANT,),
    )


async def lock_unused(
    transaction: AsyncSession, now: datetime, limit: int, held: Collection[str]
) -> list[AdapterRow]:
    """Lock adapters that ended a while ago, and whose files no other adapter has.

    The tenants take turns. Files that another adapter has are left to it.
    """
    before = now - KEPT_AFTER_DELETION
    rows = await lock_in_turns(
        transaction,
        AdapterRow,
        is_due=and_(AdapterRow.is_stored, AdapterRow.claimed_until <= now, _ended(before)),
        is_held=AdapterRow.id.in_(held),
        owners=(AdapterRow.tenant_id,),
        order=AdapterRow.claimed_until,
        limit=limit,
    )
    for row in rows:
        others = select(AdapterRow.id).where(
            AdapterRow.sha256 == row.sha256, AdapterRow.id != row.id, not_(_ended(before))
        )
        row.is_stored = await transaction.scalar(others.limit(1)) is None
    await transaction.flush()
    return [row for row in rows if row.is_stored]


def _ended(before: datetime) -> ColumnElement[bool]:
    """Whether an adapter has failed or was deleted before a time."""
    return or_(
        and_(AdapterRow.state == AdapterState.FAILED, AdapterRow.claimed_until < before),
        and_(AdapterRow.state == AdapterState.DELETED, AdapterRow.deleted_at < before),
    )
