"""Row limits per tenant, so that no tenant fills the database."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from gateway.platform.database.locking import lock_tenant
from gateway.platform.database.tables import ApiKeyRow, MemberRow, ProjectRow
from gateway.records.errors import ConflictError, shown

Holding = type[ApiKeyRow] | type[MemberRow] | type[ProjectRow]

MOST_OF_TENANT: Final[Mapping[Holding, int]] = MappingProxyType(
    {ApiKeyRow: 10_000, MemberRow: 1_000, ProjectRow: 1_000}
)
"""Maximum rows of one tenant, including revoked keys and archived projects, which are kept."""

_NAMES: Final[Mapping[Holding, str]] = MappingProxyType(
    {ApiKeyRow: "keys", MemberRow: "members", ProjectRow: "projects"}
)


async def require_room(transaction: AsyncSession, table: Holding, tenant_id: str) -> None:
    """Raise ConflictError if the tenant has the maximum number.

    Additions to one tenant are serialized.
    """
    await lock_tenant(transaction, tenant_id)
    number = await transaction.scalar(
        select(func.count()).select_from(table).where(table.tenant_id == tenant_id)
    )
    if (number or 0) >= MOST_OF_TENANT[table]:
        raise ConflictError(
            f"The tenant {shown(tenant_id)} already has {number} {_NAMES[table]}, the maximum."
        )
