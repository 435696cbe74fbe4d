"""Queries on the table `projects`."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from sqlalchemy import select, update
from sqlalchemy.ext.asyncio import AsyncSession

from gateway.database.paging import Page, PageRequest, read_page
from gateway.database.tables import ProjectRow
from gateway.tenancy.records import Project


class ProjectStore:
    """The tenants' projects, within one transaction."""

    def __init__(self, transaction: AsyncSession) -> None:
        self._transaction = transaction

    async def add(self, project: Project) -> None:
        """Insert a project."""
        self._transaction.add(ProjectRow(**asdict(project)))
        await self._transaction.flush()

    async def find(
        self, tenant_id: str, project_id: str, *, is_locked: bool = False
    ) -> Project | None:
        """Return the tenant's project.

        With `is_locked`, no other transaction changes it before this one ends.
        """
        query = select(ProjectRow).where(
            ProjectRow.tenant_id == tenant_id, ProjectRow.id == project_id
        )
        row = await self._transaction.scalar(query.with_for_update() if is_locked else query)
        return None if row is None else row.to_record()

    async def list_of_tenant(self, tenant_id: str) -> list[Project]:
        """Return the tenant's projects, oldest first, including archived ones."""
        rows = await self._transaction.scalars(
            select(ProjectRow)
            .where(ProjectRow.tenant_id == tenant_id)
            .order_by(ProjectRow.created_at, ProjectRow.id)
        )
        return [row.to_record() for row in rows]

    async def page(
        self, tenant_id: str, wanted: PageRequest, *, project_id: str | None = None
    ) -> Page[Project]:
        """Return a page of the tenant's projects, oldest first; only this project, if given."""
        conditions = [ProjectRow.tenant_id == tenant_id]
        if project_id is not None:
            conditions.append(ProjectRow.id == project_id)
        page = await read_page(self._transaction, ProjectRow, wanted, *conditions)
        return Page([row.to_record() for row in page.entries], page.has_more)

    async def change(self, tenant_id: str, project_id: str, columns: Mapping[str, Any]) -> None:
        """Change one or more columns of the tenant's project."""
        await self._transaction.execute(
            update(ProjectRow)
            .where(ProjectRow.tenant_id == tenant_id, ProjectRow.id == project_id)
            .values(**columns)
        )
