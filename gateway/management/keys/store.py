"""Queries on the table `api_keys`."""

from collections.abc import Collection, Mapping
from dataclasses import asdict
from typing import Any

from sqlalchemy import or_, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from gateway.database.paging import Page, PageRequest, read_page
from gateway.database.tables import ApiKeyRow
from gateway.tenancy.records import KeyRecord


class KeyStore:
    """The tenants' keys, within one transaction."""

    def __init__(self, transaction: AsyncSession) -> None:
        self._transaction = transaction

    async def add(self, key: KeyRecord) -> None:
        """Insert a key."""
        self._transaction.add(ApiKeyRow(**_stored(asdict(key))))
        await self._transaction.flush()

    async def list_of_tenant(self, tenant_id: str) -> list[KeyRecord]:
        """Return the tenant's keys, oldest first."""
        rows = await self._transaction.scalars(
            select(ApiKeyRow)
            .where(ApiKeyRow.tenant_id == tenant_id)
            .order_by(ApiKeyRow.created_at, ApiKeyRow.id)
        )
        return [row.to_record() for row in rows]

    async def page(
        self, tenant_id: str, wanted: PageRequest, *, project_id: str | None = None
    ) -> Page[KeyRecord]:
        """Return a page of the tenant's keys, oldest first; only of one project, if given."""
        conditions = [ApiKeyRow.tenant_id == tenant_id]
        if project_id is not None:
            conditions.append(ApiKeyRow.project_id == project_id)
        page = await read_page(self._transaction, ApiKeyRow, wanted, *conditions)
        return Page([row.to_record() for row in page.entries], page.has_more)

    async def names(
        self, tenant_id: str, ids: Collection[str], *, project_id: str | None = None
    ) -> dict[str, str]:
        """Return the names of the tenant's keys by id; only of one project, if given."""
        query = select(ApiKeyRow.id, ApiKeyRow.name).where(
            ApiKeyRow.tenant_id == tenant_id, ApiKeyRow.id.in_(ids)
        )
        if project_id is not None:
            query = query.where(ApiKeyRow.project_id == project_id)
        found = await self._transaction.execute(query)
        return dict(found.tuples().all())

    async def find(
        self, tenant_id: str, id_or_prefix: str, *, is_locked: bool = False
    ) -> KeyRecord | None:
        """Return the tenant's key with this id or public prefix.

        The prefix of its former secret matches too. With `is_locked`, no other transaction changes
        the key before this one ends.
        """
        query = select(ApiKeyRow).where(
            ApiKeyRow.tenant_id == tenant_id,
            or_(
                ApiKeyRow.id == id_or_prefix,
                ApiKeyRow.prefix == id_or_prefix,
                ApiKeyRow.old_prefix == id_or_prefix,
            ),
        )
        row = await self._transaction.scalar(query.with_for_update() if is_locked else query)
        return None if row is None else row.to_record()

    async def lock(self, ids: Collection[str]) -> list[KeyRecord]:
        """Return keys of any tenants, which no other transaction changes before this one ends."""
        query = select(ApiKeyRow).where(ApiKeyRow.id.in_(ids)).order_by(ApiKeyRow.id)
        return [row.to_record() for row in await self._transaction.scalars(query.with_for_update())]

    async def change(self, tenant_id: str, key_id: str, columns: Mapping[str, Any]) -> None:
        """Change one or more columns of the tenant's key; values as in a KeyRecord."""
        await self._transaction.execute(
            update(ApiKeyRow)
            .where(ApiKeyRow.tenant_id == tenant_id, ApiKeyRow.id == key_id)
            .values(**_stored(columns))
        )


def _stored(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record's values as stored in the table: sets and networks as lists of text."""
    stored = dict(columns)
    for name in ("scopes", "allowed_models"):
        if stored.get(name) is not None:
            stored[name] = sorted(stored[name])
    if stored.get("allowed_addresses") is not None:
        stored["allowed_addresses"] = [str(network) for network in stored["allowed_addresses"]]
    return stored
