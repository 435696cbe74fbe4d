"""Queries on the table `adapters`."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, and_, func, or_, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from gateway.database.paging import Page, PageRequest, read_page
from gateway.database.tables import AdapterRow
from gateway.tenancy.adapters import Adapter, AdapterState

_IS_LIVE = AdapterRow.state != AdapterState.DELETED


class AdapterStore:
    """Adapters, within one transaction."""

    def __init__(self, transaction: AsyncSession) -> None:
        self._transaction = transaction

    async def add(self, adapter: Adapter, *, claimed_until: datetime) -> None:
        """Insert an adapter whose files are not copied yet."""
        self._transaction.add(
            AdapterRow(
                id=adapter.id,
                tenant_id=adapter.tenant_id,
                name=adapter.name,
                base_model=adapter.base_model,
                source=adapter.source,
                is_shared=adapter.is_shared,
                state=adapter.state,
                reason="",
                sha256="",
                rank=0,
                target_modules=[],
                size=0,
                is_stored=False,
                created_at=adapter.created_at,
                claimed_until=claimed_until,
            )
        )
        await self._transaction.flush()

    async def find(self, tenant_id: str, id_or_name: str) -> Adapter | None:
        """Return a tenant's adapter that is not deleted."""
        row = await self._transaction.scalar(
            select(AdapterRow).where(
                AdapterRow.tenant_id == tenant_id,
                or_(AdapterRow.id == id_or_name, AdapterRow.name == id_or_name),
                _IS_LIVE,
            )
        )
        return None if row is None else row.to_record()

    async def find_shared(self, name: str) -> Adapter | None:
        """Return the shared adapter with this name."""
        row = await self._transaction.scalar(
            select(AdapterRow).where(AdapterRow.name == name, AdapterRow.is_shared, _IS_LIVE)
        )
        return None if row is None else row.to_record()

    async def count(self, tenant_id: str) -> int:
        """Return how many adapters of a tenant are not deleted."""
        query = select(func.count()).where(AdapterRow.tenant_id == tenant_id, _IS_LIVE)
        return await self._transaction.scalar(query) or 0

    async def page(self, tenant_id: str | None, wanted: PageRequest) -> Page[Adapter]:
        """Return a page of adapters that are not deleted: of a tenant, or of all tenants."""
        conditions: list[ColumnElement[bool]] = [_IS_LIVE]
        if tenant_id is not None:
            conditions.append(AdapterRow.tenant_id == tenant_id)
        page = await read_page(self._transaction, AdapterRow, wanted, *conditions)
        return Page([row.to_record() for row in page.entries], page.has_more)

    async def change(self, adapter_id: str, **columns: Any) -> bool:
        """Change columns of an adapter, unless it is deleted. Return whether it was changed."""
        changed = await self._transaction.scalars(
            update(AdapterRow)
            .where(AdapterRow.id == adapter_id, _IS_LIVE)
            .values(**columns)
            .returning(AdapterRow.id)
        )
        return bool(list(changed))

    async def claim(self, now: datetime, until: datetime, *, limit: int) -> list[Adapter]:
        """Claim adapters whose files nobody checks."""
        rows = await self._transaction.scalars(
            select(AdapterRow)
            .where(
                AdapterRow.state == AdapterState.VALIDATING,
                AdapterRow.claimed_until < now,
            )
            .order_by(AdapterRow.claimed_until)
            .limit(limit)
            .with_for_update(skip_locked=True)
        )
        found = list(rows)
        for row in found:
            row.claimed_until = until
        await self._transaction.flush()
        return [row.to_record() for row in found]

    async def to_remove(self, deleted_before: datetime, *, limit: int) -> Sequence[Adapter]:
        """Return deleted adapters whose files may still be stored."""
        rows = await self._transaction.scalars(
            select(AdapterRow)
            .where(
                AdapterRow.state == AdapterState.DELETED,
                AdapterRow.is_stored,
                AdapterRow.deleted_at < deleted_before,
            )
            .limit(limit)
        )
        return [row.to_record() for row in rows]

    async def is_used(self, sha256: str, *, deleted_before: datetime) -> bool:
        """Return whether another adapter has these files, or may have them once it is validated.

        Adapters that were deleted before the given time do not count.
        """
        query = select(AdapterRow.id).where(
            or_(
                AdapterRow.state == AdapterState.VALIDATING,
                and_(
                    AdapterRow.sha256 == sha256,
                    or_(_IS_LIVE, AdapterRow.deleted_at >= deleted_before),
                ),
            )
        )
        return await self._transaction.scalar(query.limit(1)) is not None

    async def note_removed(self, adapter_id: str) -> None:
        """Note that the files of a deleted adapter are no longer stored."""
        await self._transaction.execute(
            update(AdapterRow).where(AdapterRow.id == adapter_id).values(is_stored=False)
        )
