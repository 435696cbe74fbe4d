"""Queries on the table `api_keys`."""

from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import or_, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from gateway.accounts.records import KeyOptions, KeyRecord, Plan, Project, Tenant
from gateway.accounts.tables import ApiKeyRow, PlanRow, ProjectRow, TenantRow


class KeyOwner(NamedTuple):
    """A key together with whom it belongs to."""

    key: KeyRecord
    tenant: Tenant
    project: Project | None
    plan: Plan | None


class KeyStore:
    """The tenants' keys, within one transaction."""

    def __init__(self, transaction: AsyncSession) -> None:
        self._transaction = transaction

    async def add(self, tenant_id: str, key: KeyRecord) -> None:
        """Insert a key of the tenant."""
        models = key.allowed_models
        self._transaction.add(
            ApiKeyRow(
                id=key.id,
                tenant_id=tenant_id,
                prefix=key.prefix,
                digest=key.digest,
                name=key.name,
                scopes=sorted(key.scopes),
                allowed_models=None if models is None else sorted(models),
                expires_at=key.expires_at,
                revoked_at=key.revoked_at,
                created_at=key.created_at,
                dialect=key.dialect,
            )
        )
        await self._transaction.flush()

    async def list_of_tenant(self, tenant_id: str) -> list[KeyRecord]:
        """Return the tenant's keys, oldest first."""
        rows = await self._transaction.scalars(
            select(ApiKeyRow)
            .where(ApiKeyRow.tenant_id == tenant_id)
            .order_by(ApiKeyRow.created_at, ApiKeyRow.id)
        )
        return [row.to_record() for row in rows]

    async def find(self, tenant_id: str, id_or_prefix: str) -> KeyRecord | None:
        """Return the tenant's key that has this id or public prefix."""
        row = await self._transaction.scalar(
            select(ApiKeyRow)
            .where(ApiKeyRow.tenant_id == tenant_id)
            .where(or_(ApiKeyRow.id == id_or_prefix, ApiKeyRow.prefix == id_or_prefix))
        )
        return None if row is None else row.to_record()

    async def set_options(self, tenant_id: str, key_id: str, options: KeyOptions) -> None:
        """Change at least one of these options of the tenant's key."""
        await self._transaction.execute(
            update(ApiKeyRow)
            .where(ApiKeyRow.tenant_id == tenant_id, ApiKeyRow.id == key_id)
            .values(**options)
        )

    async def set_revoked(self, tenant_id: str, key_id: str, revoked_at: datetime) -> None:
        """Mark the tenant's key as revoked."""
        await self._transaction.execute(
            update(ApiKeyRow)
            .where(ApiKeyRow.tenant_id == tenant_id, ApiKeyRow.id == key_id)
            .values(revoked_at=revoked_at)
        )

    async def find_owner(self, prefix: str) -> KeyOwner | None:
        """Return the key with this public prefix, be it that of its former secret, and whose it is."""
        found = await self._transaction.execute(
            select(ApiKeyRow, TenantRow, ProjectRow, PlanRow)
            .join(TenantRow, TenantRow.id == ApiKeyRow.tenant_id)
            .outerjoin(ProjectRow, ProjectRow.id == ApiKeyRow.project_id)
            .outerjoin(PlanRow, PlanRow.id == TenantRow.plan_id)
            .where(or_(ApiKeyRow.prefix == prefix, ApiKeyRow.old_prefix == prefix))
        )
        row: Any = found.one_or_none()
        if row is None:
            return None
        key, tenant, project, plan = row
        return KeyOwner(
            key.to_record(),
            tenant.to_record(),
            None if project is None else project.to_record(),
            None if plan is None else plan.to_record(),
        )
