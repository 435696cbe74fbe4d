"""Project lifecycle: create, change, archive and activate."""

import secrets
from dataclasses import replace
from typing import Any, Final

from sqlalchemy.ext.asyncio import AsyncSession
from typing_extensions import Unpack

from gateway.database.engine import Database
from gateway.database.paging import Page, PageRequest
from gateway.database.tables import ProjectRow
from gateway.errors import NotFoundError, shown
from gateway.management.audit.log import SYSTEM, AuditLog
from gateway.management.plans.store import PlanStore
from gateway.management.projects.store import ProjectStore
from gateway.management.shared.capacity import require_room
from gateway.management.tenants.service import reading_of_tenant
from gateway.tenancy.changes import ChangeAnnouncer
from gateway.tenancy.checks import check_known, check_name, check_not_empty
from gateway.tenancy.grants import Grant, bounds_of_project, defaults_of
from gateway.tenancy.limits import LimitChanges, LimitScope, changed_limits
from gateway.tenancy.records import Plan, Project, ProjectChanges, ProjectStatus
from gateway.tenancy.times import utc_now

_ACTIONS: Final = {
    ProjectStatus.ARCHIVED: "project.archive",
    ProjectStatus.ACTIVE: "project.activate",
}


class ProjectService:
    """Creates, changes and archives tenants' projects; every change is audited.

    If a credential of the tenant makes the call, its grant is the `grantor`. The credential of a
    project sees only that project. It creates and changes no project with wider limits than its
    own. Otherwise the methods raise PermissionDeniedError.
    """

    def __init__(self, database: Database, announcer: ChangeAnnouncer) -> None:
        self._database = database
        self._announcer = announcer

    async def create(
        self,
        tenant_id: str,
        *,
        name: str,
        limits: LimitChanges | None = None,
        grantor: Grant | None = None,
        actor: str = SYSTEM,
    ) -> Project:
        """Create a project of the tenant, with the grantor's limits where none are given."""
        check_known(tenant_id, "tenant")
        check_name(name)
        given = limits or {}
        async with self._database.writing() as transaction:
            await require_room(transaction, ProjectRow, tenant_id)
            plan = await PlanStore(transaction).of_tenant(tenant_id)
            if grantor is not None:
                grantor.require_whole_tenant()
                given = grantor.inherit_limits(given, defaults_of(plan, LimitScope.PROJECT))
            project = Project(
                id=f"prj_{secrets.token_hex(8)}",
                tenant_id=tenant_id,
                name=name,
                status=ProjectStatus.ACTIVE,
                created_at=utc_now(),
                limits=changed_limits({}, given),
            )
            if grantor is not None:
                grantor.require(bounds_of_project(project, plan))
            await ProjectStore(transaction).add(project)
            await AuditLog(transaction).append(
                "project.create",
                project.id,
                actor=actor,
                tenant_id=tenant_id,
                details={"name": name, "limits": project.limits},
            )
        return project

    async def list_of_tenant(self, tenant_id: str) -> list[Project]:
        """Return the tenant's projects, oldest first, including archived ones."""
        async with reading_of_tenant(self._database, tenant_id) as transaction:
            return await ProjectStore(transaction).list_of_tenant(tenant_id)

    async def page(
        self, tenant_id: str, wanted: PageRequest, *, grantor: Grant | None = None
    ) -> Page[Project]:
        """Return a page of the tenant's projects, oldest first."""
        project_id = None if grantor is None else grantor.project_id
        async with reading_of_tenant(self._database, tenant_id) as transaction:
            return await ProjectStore(transaction).page(tenant_id, wanted, project_id=project_id)

    async def get(
        self, tenant_id: str, project_id: str, *, grantor: Grant | None = None
    ) -> Project:
        """Return the tenant's project."""
        async with self._database.reading() as transaction:
            return await find_project(transaction, tenant_id, project_id, grantor=grantor)

    async def update(
        self,
        tenant_id: str,
        project_id: str,
        *,
        grantor: Grant | None = None,
        actor: str = SYSTEM,
        **options: Unpack[ProjectChanges],
    ) -> Project:
        """Change the given options on every gateway; of `limits`, only those it contains."""
        check_not_empty(options)
        if "name" in options:
            check_name(options["name"])
        async with self._database.writing() as transaction:
            project, plan = await _managed(transaction, tenant_id, project_id, grantor)
            columns: dict[str, Any] = {**options}
            if "limits" in options:
                columns["limits"] = changed_limits(project.limits, options["limits"])
            changed = replace(project, **columns)
            if grantor is not None:
                grantor.require(bounds_of_project(changed, plan))
            await ProjectStore(transaction).change(tenant_id, project_id, columns)
            await AuditLog(transaction).append(
                "project.update", project_id, actor=actor, tenant_id=tenant_id, details=options
            )
        await self._announcer.tenant_changed(tenant_id)
        return changed

    async def archive(
        self,
        tenant_id: str,
        project_id: str,
        *,
        grantor: Grant | None = None,
        actor: str = SYSTEM,
    ) -> Project:
        """Archive the project: every gateway rejects requests with its keys from now on."""
        return await self._set_status(
            tenant_id, project_id, ProjectStatus.ARCHIVED, grantor=grantor, actor=actor
        )

    async def activate(
        self,
        tenant_id: str,
        project_id: str,
        *,
        grantor: Grant | None = None,
        actor: str = SYSTEM,
    ) -> Project:
        """Activate an archived project, so that its keys work again."""
        return await self._set_status(
            tenant_id, project_id, ProjectStatus.ACTIVE, grantor=grantor, actor=actor
        )

    async def _set_status(
        self,
        tenant_id: str,
        project_id: str,
        status: ProjectStatus,
        *,
        grantor: Grant | None,
        actor: str,
    ) -> Project:
        """Change the status; a repeated call announces it again."""
        async with self._database.writing() as transaction:
            project, _ = await _managed(transaction, tenant_id, project_id, grantor)
            if project.status is not status:
                await ProjectStore(transaction).change(tenant_id, project_id, {"status": status})
                await AuditLog(transaction).append(
                    _ACTIONS[status], project_id, actor=actor, tenant_id=tenant_id
                )
        await self._announcer.tenant_changed(tenant_id)
        return replace(project, status=status)


async def _managed(
    transaction: AsyncSession, tenant_id: str, project_id: str, grantor: Grant | None
) -> tuple[Project, Plan | None]:
    """Return a locked project that the grantor may manage as it is, and its tenant's plan."""
    project = await find_project(
        transaction, tenant_id, project_id, grantor=grantor, is_locked=True
    )
    plan = await PlanStore(transaction).of_tenant(tenant_id)
    if grantor is not None:
        grantor.require(bounds_of_project(project, plan), of=f"the project {shown(project_id)}")
    return project, plan


async def find_project(
    transaction: AsyncSession,
    tenant_id: str,
    project_id: str,
    *,
    grantor: Grant | None = None,
    is_locked: bool = False,
) -> Project:
    """Return the tenant's project. Raises NotFoundError, also if the grantor does not see it."""
    check_known(project_id, "project")
    check_known(tenant_id, "tenant")
    project = await ProjectStore(transaction).find(tenant_id, project_id, is_locked=is_locked)
    if project is None or (grantor is not None and not grantor.sees(project_id)):
        raise NotFoundError(
            f"The tenant {shown(tenant_id)} has no project {shown(project_id)}.", param="project_id"
        )
    return project
