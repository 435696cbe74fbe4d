"""Projects, parts of a tenant with their own keys and limits.

Tenants have these routes at `/v1/projects`, operators at `/admin/tenants/{tenant_id}/projects`.
"""

from datetime import datetime
from typing import Annotated, Literal

from fastapi import Path

from gateway.accounts.projects.service import ProjectService
from gateway.accounts.routes_common import (
    BodyWithLimits,
    ChangeBody,
    DisplayName,
    LimitsShown,
    ListBody,
    OfTenant,
    RecordBody,
    TenantRouter,
    WantedPage,
    own_tenant,
)
from gateway.http.services import made
from gateway.platform.database.paging import Page
from gateway.records.records import Project, ProjectStatus
from gateway.records.scopes import Scope


class ProjectCreation(BodyWithLimits):
    """A project to create."""

    name: DisplayName


class ProjectChange(ChangeBody, BodyWithLimits):
    """Changes to a project; absent fields stay unchanged."""

    name: DisplayName = ""


class ProjectBody(RecordBody):
    """A project."""

    object: Literal["project"] = "project"
    id: str
    tenant_id: str
    name: str
    status: ProjectStatus
    limits: LimitsShown
    created_at: datetime


router = TenantRouter("/projects", "Projects", own_tenant(Scope.KEYS))


Projects = Annotated[ProjectService, made(ProjectService)]
ProjectId = Annotated[str, Path(description="Id of the project.")]


@router.get("", summary="List projects", response_model=ListBody[ProjectBody])
async def list_projects(projects: Projects, caller: OfTenant, wanted: WantedPage) -> Page[Project]:
    """List projects, oldest first, including archived projects.

    All routes under `/v1/projects` need the scope `keys`. A project credential sees only its
    project and cannot change projects.
    """
    return await projects.page(caller.tenant_id, wanted, grantor=caller.grant)


@router.post("", summary="Create a project", response_model=ProjectBody)
async def create_project(projects: Projects, caller: OfTenant, body: ProjectCreation) -> Project:
    """Create a project. To create a key in it, name the project in the key's request."""
    return await projects.create(caller.tenant_id, **body.options(), **caller.by)


@router.get("/{project_id}", summary="Get a project", response_model=ProjectBody)
async def get_project(projects: Projects, caller: OfTenant, project_id: ProjectId) -> Project:
    """Get a project with its own limits."""
    return await projects.get(caller.tenant_id, project_id, grantor=caller.grant)


@router.patch("/{project_id}", summary="Update a project", response_model=ProjectBody)
async def change_project(
    projects: Projects, caller: OfTenant, project_id: ProjectId, body: ProjectChange
) -> Project:
    """Change the given fields. All gateways apply the change within a second."""
    return await projects.update(caller.tenant_id, project_id, **body.options(), **caller.by)


@router.post("/{project_id}:archive", summary="Archive a project", response_model=ProjectBody)
async def archive_project(projects: Projects, caller: OfTenant, project_id: ProjectId) -> Project:
    """Archive the project. All gateways reject its keys within a second."""
    return await projects.archive(caller.tenant_id, project_id, **caller.by)


@router.post(
    "/{project_id}:activate", summary="Activate an archived project", response_model=ProjectBody
)
async def activate_project(projects: Projects, caller: OfTenant, project_id: ProjectId) -> Project:
    """Activate the project. Its keys work again."""
    return await projects.activate(caller.tenant_id, project_id, **caller.by)
