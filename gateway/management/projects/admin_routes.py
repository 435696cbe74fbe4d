"""Projects of any tenant, for operators: `/admin/tenants/{tenant_id}/projects`."""

from fastapi import APIRouter

from gateway.database.paging import PageRequest
from gateway.http.authorization import CanAdminister, CanSeeEverything
from gateway.http.bounded_route import BoundedRoute
from gateway.management.projects.routes import ProjectId, Projects
from gateway.management.projects.schemas import (
    ProjectBody,
    ProjectChange,
    ProjectCreation,
    ProjectList,
)
from gateway.management.shared.parameters import AfterId, PageSize
from gateway.management.tenants.admin_routes import TenantId

router = APIRouter(
    prefix="/tenants/{tenant_id}/projects", tags=["Projects"], route_class=BoundedRoute
)


@router.get("", summary="List a tenant's projects")
async def list_projects(
    projects: Projects,
    _principal: CanSeeEverything,
    tenant_id: TenantId,
    after: AfterId = None,
    limit: PageSize = 20,
) -> ProjectList:
    """List projects, oldest first, including archived projects."""
    return ProjectList.of(await projects.page(tenant_id, PageRequest(after, limit)))


@router.post("", summary="Create a project of a tenant")
async def create_project(
    projects: Projects, principal: CanAdminister, tenant_id: TenantId, body: ProjectCreation
) -> ProjectBody:
    """Create a project, optionally with its own limits."""
    created = await projects.create(tenant_id, **body.options(), actor=principal.actor)
    return ProjectBody.of(created)


@router.get("/{project_id}", summary="Get a tenant's project")
async def get_project(
    projects: Projects, _principal: CanSeeEverything, tenant_id: TenantId, project_id: ProjectId
) -> ProjectBody:
    """Get a project with its own limits."""
    return ProjectBody.of(await projects.get(tenant_id, project_id))


@router.patch("/{project_id}", summary="Update a tenant's project")
async def change_project(
    projects: Projects,
    principal: CanAdminister,
    tenant_id: TenantId,
    project_id: ProjectId,
    body: ProjectChange,
) -> ProjectBody:
    """Change the fields that the body contains."""
    changed = await projects.update(tenant_id, project_id, **body.options(), actor=principal.actor)
    return ProjectBody.of(changed)


@router.post("/{project_id}:archive", summary="Archive a tenant's project")
async def archive_project(
    projects: Projects, principal: CanAdminister, tenant_id: TenantId, project_id: ProjectId
) -> ProjectBody:
    """Archive the project. All gateways reject its keys within a second."""
    return ProjectBody.of(await projects.archive(tenant_id, project_id, actor=principal.actor))


@router.post("/{project_id}:activate", summary="Activate a tenant's archived project")
async def activate_project(
    projects: Projects, principal: CanAdminister, tenant_id: TenantId, project_id: ProjectId
) -> ProjectBody:
    """Activate the project. Its keys work again."""
    return ProjectBody.of(await projects.activate(tenant_id, project_id, actor=principal.actor))
