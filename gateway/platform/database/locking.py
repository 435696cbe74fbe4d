"""Tenant lock: serialize the changes of one tenant."""

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from gateway.platform.database.tables import TenantRow
from gateway.records.errors import NotFoundError, shown


async def lock_tenant(transaction: AsyncSession, tenant_id: str) -> None:
    """Block other callers for the same tenant until the transaction ends.

    SQLite runs only one writing transaction at a time anyway. Raises NotFoundError if the tenant
    does not exist.
    """
    # FOR NO KEY UPDATE: other transactions may still add rows that refer to the tenant.
    found = await transaction.scalar(
        select(TenantRow.id).where(TenantRow.id == tenant_id).with_for_update(key_share=True)
    )
    if found is None:
        raise NotFoundError(f"There is no tenant {shown(tenant_id)}.")
