"""The rules of a project's life."""

import secrets
from dataclasses import replace
from typing import Any, Final

from sqlalchemy.ext.asyncio import AsyncSession
from typing_extensions import Unpack

from gateway.accounts.audit import SYSTEM, AuditLog
from gateway.accounts.capacity import require_room
from gateway.accounts.changes import ChangeAnnouncer
from gateway.accounts.checks import check_known, check_name, check_not_empty
from gateway.accounts.database import Database
from gateway.accounts.details import details_of
from gateway.accounts.limits import LimitChanges, changed_limits
from gateway.accounts.paging import Page, PageRequest
from gateway.accounts.project_store import ProjectStore
from gateway.accounts.records import Project, ProjectChanges, ProjectStatus
from gateway.accounts.tables import ProjectRow
from gateway.accounts.tenant_service import reading_of_tenant
from gateway.accounts.times import utc_now
from gateway.errors import NotFoundError, shown

_ACTIONS: Final = {
    ProjectStatus.ARCHIVED: "project.archive",
    ProjectStatus.ACTIVE: "project.activate",
}


class ProjectService:
    """Creates, changes and archives tenants' projects; every change is audited."""

    def __init__(self, database: Database, announcer: ChangeAnnouncer) -> None:
        self._database = database
        self._announcer = announcer

    async def create(
        self, tenant_id: str, *, name: str, limits: LimitChanges | None = None, actor: str = SYSTEM
    ) -> Project:
        """Add a project to the tenant."""
        check_known(tenant_id, "tenant")
        check_name(name)
        project = Project(
            id=f"prj_{secrets.token_hex(8)}",
            tenant_id=tenant_id,
            name=name,
            status=ProjectStatus.ACTIVE,
            created_at=utc_now(),
            limits=changed_limits({}, limits or {}),
        )
        async with self._database.writing() as transaction:
            await require_room(transaction, ProjectRow, tenant_id)
            await ProjectStore(transaction).add(tenant_id, project)
            await AuditLog(transaction).append(
                "project.create",
                project.id,
                actor=actor,
                tenant_id=tenant_id,
                details=details_of({"name": name, "limits": project.limits}),
            )
        return project

    async def list_of_tenant(self, tenant_id: str) -> list[Project]:
        """Return the tenant's projects, oldest first, the archived ones included."""
        async with reading_of_tenant(self._database, tenant_id) as transaction:
            return await ProjectStore(transaction).list_of_tenant(tenant_id)

    async def page(self, tenant_id: str, wanted: PageRequest) -> Page[Project]:
        """Return some of the tenant's projects, oldest first."""
        async with reading_of_tenant(self._database, tenant_id) as transaction:
            return await ProjectStore(transaction).page(tenant_id, wanted)

    async def get(self, tenant_id: str, project_id: str) -> Project:
        """Return the tenant's project."""
        async with self._database.reading() as transaction:
            return await find_project(transaction, tenant_id, project_id)

    async def update(
        self,
        tenant_id: str,
        project_id: str,
        *,
        actor: str = SYSTEM,
        **options: Unpack[ProjectChanges],
    ) -> Project:
        """Change the options that are given, on every gateway; of `limits` those that are named."""
        check_not_empty(options)
        if "name" in options:
            check_name(options["name"])
        async with self._database.writing() as transaction:
            project = await find_project(transaction, tenant_id, project_id, is_locked=True)
            columns: dict[str, Any] = {**options}
            if "limits" in options:
                columns["limits"] = changed_limits(project.limits, options["limits"])
            await ProjectStore(transaction).change(tenant_id, project_id, columns)
            await AuditLog(transaction).append(
                "project.update",
                project_id,
                actor=actor,
                tenant_id=tenant_id,
                details=details_of(options),
            )
        await self._announcer.tenant_changed(tenant_id)
        return replace(project, **columns)

    async def archive(self, tenant_id: str, project_id: str, *, actor: str = SYSTEM) -> Project:
        """Refuse requests with the project's keys from now on, on every gateway."""
        return await self._set_status(
            tenant_id, project_id, status=ProjectStatus.ARCHIVED, actor=actor
        )

    async def activate(self, tenant_id: str, project_id: str, *, actor: str = SYSTEM) -> Project:
        """Let the keys of an archived project work again."""
        return await self._set_status(
            tenant_id, project_id, status=ProjectStatus.ACTIVE, actor=actor
        )

    async def _set_status(
        self, tenant_id: str, project_id: str, *, status: ProjectStatus, actor: str
    ) -> Project:
        """Change the status; it may be repeated, for instance to announce it again."""
        async with self._database.writing() as transaction:
            project = await find_project(transaction, tenant_id, project_id, is_locked=True)
            if project.status is not status:
                await ProjectStore(transaction).change(tenant_id, project_id, {"status": status})
                await AuditLog(transaction).append(
                    _ACTIONS[status], project_id, actor=actor, tenant_id=tenant_id
                )
        await self._announcer.tenant_changed(tenant_id)
        return replace(project, status=status)


async def find_project(
    transaction: AsyncSession, tenant_id: str, project_id: str, *, is_locked: bool = False
) -> Project:
    """Return the tenant's project. Raises NotFoundError."""
    check_known(project_id, "project")
    check_known(tenant_id, "tenant")
    project = await ProjectStore(transaction).find(tenant_id, project_id, is_locked=is_locked)
    if project is None:
        raise NotFoundError(
            f"The tenant {shown(tenant_id)} has no project {shown(project_id)}.", param="project_id"
        )
    return project
