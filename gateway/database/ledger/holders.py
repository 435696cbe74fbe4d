"""Find the tenants of projects and keys, which Redis identifies by id alone."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from gateway.database.tables import ApiKeyRow, ProjectRow, TenantRow
from gateway.tenancy.limits import LimitScope

Holder = tuple[LimitScope, str]
"""Scope and id of a holder of limits."""


class HolderStore:
    """Queries on tenants, projects and keys, within one transaction."""

    def __init__(self, transaction: AsyncSession) -> None:
        self._transaction = transaction

    async def tenants_of(self, holders: Collection[Holder]) -> Mapping[Holder, str]:
        """Return the tenant of each known holder."""
        found: dict[Holder, str] = {}
        for scope, columns in _COLUMNS.items():
            ids = [id_ for holder_scope, id_ in holders if holder_scope is scope]
            rows = await self._transaction.execute(select(*columns).where(columns[0].in_(ids)))
            found |= {(scope, id_): tenant_id for id_, tenant_id in rows}
        return found


_COLUMNS: Mapping[LimitScope, Sequence[Any]] = {
    LimitScope.TENANT: (TenantRow.id, TenantRow.id.label("tenant_id")),
    LimitScope.PROJECT: (ProjectRow.id, ProjectRow.tenant_id),
    LimitScope.KEY: (ApiKeyRow.id, ApiKeyRow.tenant_id),
}
