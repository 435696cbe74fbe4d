"""Locks: serialize changes of one kind, or of one tenant, until the end of the transaction.

SQLite runs only one writing transaction at a time anyway.
"""

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from gateway.platform.database.tables import TenantRow
from gateway.records.errors import NotFoundError, shown


async def lock_kind(transaction: AsyncSession, key: int) -> None:
    """Block other callers with the same key."""
    if transaction.get_bind().dialect.name == "postgresql":
        await transaction.execute(select(func.pg_advisory_xact_lock(key)))


async def lock_tenant(transaction: AsyncSession, tenant_id: str) -> None:
    """Block other callers for the same tenant. Raises NotFoundError if it does not exist."""
    # FOR NO KEY UPDATE: other transactions may still add rows that refer to the tenant.
    found = await transaction.scalar(
        select(TenantRow.id).where(TenantRow.id == tenant_id).with_for_update(key_share=True)
    )
    if found is None:
        raise NotFoundError(f"There is no tenant {shown(tenant_id)}.")
