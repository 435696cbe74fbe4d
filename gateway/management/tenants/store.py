"""Queries on the table `tenants`."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from sqlalchemy import or_, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from gateway.database.paging import Page, PageRequest, read_page
from gateway.database.tables import PlanRow, TenantRow
from gateway.tenancy.records import Billing, Tenant


class TenantStore:
    """The tenants, within one transaction."""

    def __init__(self, transaction: AsyncSession) -> None:
        self._transaction = transaction

    async def add(self, tenant: Tenant) -> None:
        """Insert a tenant; its id must be unused."""
        self._transaction.add(TenantRow(**asdict(tenant)))
        await self._transaction.flush()

    async def get(self, tenant_id: str) -> Tenant | None:
        """Return the tenant, or None if it does not exist."""
        row = await self._transaction.get(TenantRow, tenant_id)
        return None if row is None else row.to_record()

    async def lock(self, tenant_id: str) -> Tenant | None:
        """Return the tenant, locked until the end of the transaction."""
        row = await self._transaction.scalar(
            select(TenantRow).where(TenantRow.id == tenant_id).with_for_update()
        )
        return None if row is None else row.to_record()

    async def has_plan(self, plan_id: str) -> bool:
        """Whether the plan exists."""
        return await self._transaction.get(PlanRow, plan_id) is not None

    async def list_all(self) -> list[Tenant]:
        """Return all tenants, oldest first."""
        rows = await self._transaction.scalars(
            select(TenantRow).order_by(TenantRow.created_at, TenantRow.id)
        )
        return [row.to_record() for row in rows]

    async def prepaid(self, *, limit: int) -> list[Tenant]:
        """Return prepaid tenants, newest first."""
        rows = await self._transaction.scalars(
            select(TenantRow)
            .where(TenantRow.billing == Billing.PREPAID)
            .order_by(TenantRow.created_at.desc(), TenantRow.id.desc())
            .limit(limit)
        )
        return [row.to_record() for row in rows]

    async def page(self, wanted: PageRequest, *, text: str = "") -> Page[Tenant]:
        """Return a page of all tenants, or of those whose id or name contains a text."""
        found = or_(
            TenantRow.id.icontains(text, autoescape=True),
            TenantRow.name.icontains(text, autoescape=True),
        )
        conditions = [found] if text else []
        page = await read_page(self._transaction, TenantRow, wanted, *conditions)
        return Page([row.to_record() for row in page.entries], page.has_more)

    async def change(self, tenant_id: str, columns: Mapping[str, Any]) -> None:
        """Change one or more columns of an existing tenant."""
        await self._transaction.execute(
            update(TenantRow).where(TenantRow.id == tenant_id).values(**columns)
        )
