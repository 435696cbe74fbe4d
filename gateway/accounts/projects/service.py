"""Project lifecycle: create, change, archive and activate."""

import secrets
from dataclasses import asdict, replace
from typing import Any, Final, Unpack

from sqlalchemy import ColumnElement, and_
from sqlalchemy.ext.asyncio import AsyncSession

from gateway.accounts.audit.log import SYSTEM
from gateway.accounts.changes import By, Change, Service, changing, require_room
from gateway.accounts.plans.service import plan_of
from gateway.accounts.tenants.service import reading_of_tenant
from gateway.platform.database.paging import Page, PageRequest, find_record, read_page
from gateway.platform.database.tables import ProjectRow
from gateway.records.checks import check_known, check_name, check_not_empty
from gateway.records.errors import NotFoundError, shown
from gateway.records.grants import Grant, bounds_of_project, defaults_of
from gateway.records.limits import LimitChanges, LimitScope, changed_limits
from gateway.records.records import Plan, Project, ProjectChanges, ProjectStatus
from gateway.records.times import utc_now

_ACTIONS: Final = {
    ProjectStatus.ARCHIVED: "project.archive",
    ProjectStatus.ACTIVE: "project.activate",
}


class ProjectService(Service):
    """Creates, changes and archives tenants' projects; every change is audited.

    If a credential of the tenant makes the call, its grant is the `grantor`. The credential of a
    project sees only that project. It creates and changes no project with wider limits than its
    own. Otherwise the methods raise PermissionDeniedError.
    """

    async def create(
        self, tenant_id: str, *, name: str, limits: LimitChanges | None = None, **by: Unpack[By]
    ) -> Project:
        """Create a project of the tenant, with the grantor's limits where none are given."""
        check_known(tenant_id, "tenant")
        check_name(name)
        given = limits or {}
        async with changing(self._database, tenant_id, **by) as change:
            await require_room(change.transaction, ProjectRow, tenant_id)
            plan = await plan_of(change.transaction, tenant_id)
            if change.grantor is not None:
                change.grantor.require_whole_tenant()
                given = change.grantor.inherit_limits(given, defaults_of(plan, LimitScope.PROJECT))
            project = Project(
                id=f"prj_{secrets.token_hex(8)}",
                tenant_id=tenant_id,
                name=name,
                status=ProjectStatus.ACTIVE,
                created_at=utc_now(),
                limits=changed_limits({}, given),
            )
            change.require(bounds_of_project(project, plan))
            await change.insert(ProjectRow(**asdict(project)))
            details = {"name": name, "limits": project.limits}
            await change.audit("project.create", project.id, details)
        return project

    async def page(
        self, tenant_id: str, wanted: PageRequest, *, grantor: Grant | None = None
    ) -> Page[Project]:
        """Return a page of the tenant's projects, oldest first."""
        visible = [ProjectRow.tenant_id == tenant_id]
        if grantor is not None and grantor.project_id is not None:
            visible.append(ProjectRow.id == grantor.project_id)
        async with reading_of_tenant(self._database, tenant_id) as transaction:
            return await read_page(transaction, ProjectRow, wanted, *visible)

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
        async with changing(self._database, tenant_id, actor=actor, grantor=grantor) as change:
            project, plan = await _managed(change, tenant_id, project_id)
            columns: dict[str, Any] = {**options}
            if "limits" in options:
                columns["limits"] = changed_limits(project.limits, options["limits"])
            changed = replace(project, **columns)
            change.require(bounds_of_project(changed, plan))
            await change.set(ProjectRow, _is(tenant_id, project_id), columns)
            await change.audit("project.update", project_id, options)
            change.announce(self._announcer.tenant_changed, tenant_id)
        return changed

    async def archive(self, tenant_id: str, project_id: str, **by: Unpack[By]) -> Project:
        """Archive the project: every gateway rejects requests with its keys from now on."""
        return await self._set_status(tenant_id, project_id, ProjectStatus.ARCHIVED, **by)

    async def activate(self, tenant_id: str, project_id: str, **by: Unpack[By]) -> Project:
        """Activate an archived project, so that its keys work again."""
        return await self._set_status(tenant_id, project_id, ProjectStatus.ACTIVE, **by)

    async def _set_status(
        self, tenant_id: str, project_id: str, status: ProjectStatus, **by: Unpack[By]
    ) -> Project:
        """Change the status; a repeated call announces it again."""
        async with changing(self._database, tenant_id, **by) as change:
            project, _ = await _managed(change, tenant_id, project_id)
            if project.status is not status:
                await change.set(ProjectRow, _is(tenant_id, project_id), {"status": status})
                await change.audit(_ACTIONS[status], project_id)
            change.announce(self._announcer.tenant_changed, tenant_id)
        return replace(project, status=status)


def _is(tenant_id: str, project_id: str) -> ColumnElement[bool]:
    return and_(ProjectRow.tenant_id == tenant_id, ProjectRow.id == project_id)


async def _managed(change: Change, tenant_id: str, project_id: str) -> tuple[Project, Plan | None]:
    """Return a locked project that the grantor may manage as it is, and its tenant's plan."""
    project = await find_project(
        change.transaction, tenant_id, project_id, grantor=change.grantor, is_locked=True
    )
    plan = await plan_of(change.transaction, tenant_id)
    change.require(bounds_of_project(project, plan), of=f"the project {shown(project_id)}")
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
    is_it = _is(tenant_id, project_id)
    project = await find_record(transaction, ProjectRow, is_it, is_locked=is_locked)
    if project is None or (grantor is not None and not grantor.sees(project_id)):
        raise NotFoundError(
            f"The tenant {shown(tenant_id)} has no project {shown(project_id)}.", param="project_id"
        )
    return project
