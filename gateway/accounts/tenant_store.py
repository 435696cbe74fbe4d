"""Queries on the table `tenants`."""

from sqlalchemy import select, update
from sqlalchemy.ext.asyncio import AsyncSession

from gateway.accounts.records import Tenant, TenantOptions, TenantStatus
from gateway.accounts.tables import TenantRow


class TenantStore:
    """The tenants, within one transaction."""

    def __init__(self, transaction: AsyncSession) -> None:
        self._transaction = transaction

    async def add(self, tenant: Tenant) -> None:
        """Insert a tenant whose id is not taken."""
        self._transaction.add(
            TenantRow(
                id=tenant.id,
                name=tenant.name,
                weight=tenant.weight,
                status=tenant.status,
                created_at=tenant.created_at,
                dialect=tenant.dialect,
                strict_parameters=tenant.strict_parameters,
                default_model=tenant.default_model,
            )
        )
        await self._transaction.flush()

    async def get(self, tenant_id: str) -> Tenant | None:
        """Return the tenant, or None where there is none."""
        row = await self._transaction.get(TenantRow, tenant_id)
        return None if row is None else row.to_record()

    async def list_all(self) -> list[Tenant]:
        """Return all tenants, oldest first."""
        rows = await self._transaction.scalars(
            select(TenantRow).order_by(TenantRow.created_at, TenantRow.id)
        )
        return [row.to_record() for row in rows]

    async def set_options(self, tenant_id: str, options: TenantOptions) -> None:
        """Change at least one of these options of an existing tenant."""
        await self._transaction.execute(
            update(TenantRow).where(TenantRow.id == tenant_id).values(**options)
        )

    async def set_status(self, tenant_id: str, status: TenantStatus) -> None:
        """Change the status of an existing tenant."""
        await self._transaction.execute(
            update(TenantRow).where(TenantRow.id == tenant_id).values(status=status)
        )
