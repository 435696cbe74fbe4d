"""Letting the changes of one tenant take turns."""

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from gateway.accounts.tables import TenantRow
from gateway.errors import NotFoundError, shown


async def lock_tenant(transaction: AsyncSession, tenant_id: str) -> None:
    """Let nobody else who calls this for the tenant go on before the transaction has ended.

    On SQLite a writing transaction is alone anyway. Raises NotFoundError where there is no such tenant.
    """
    # FOR NO KEY UPDATE: rows that refer to the tenant may still be added by others.
    found = await transaction.scalar(
        select(TenantRow.id).where(TenantRow.id == tenant_id).with_for_update(key_share=True)
    )
    if found is None:
        raise NotFoundError(f"There is no tenant {shown(tenant_id)}.")
