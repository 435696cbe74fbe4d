"""Projects and members of a tenant."""

from typing import Annotated, Any, Final

from fastapi import APIRouter, Depends, Request, Response

from gateway.accounts.limits import Reports, ScopeBody
from gateway.accounts.members import MemberAddition, MemberChange, Members, MemberService
from gateway.accounts.projects.routes import ProjectChange, ProjectCreation, Projects
from gateway.accounts.shared import AfterId
from gateway.console.forms import Form, checked
from gateway.console.limit_fields import fields_of, labels_of, read_limits
from gateway.console.rendering import confirmation, page
from gateway.console.routing import SentForm, TenantRoute, Visitor, following, needs, redirect
from gateway.platform.database.paging import PageRequest
from gateway.records.errors import ApiError
from gateway.records.limits import LimitScope
from gateway.records.records import Project, ProjectStatus
from gateway.records.scopes import Role, Scope

ROWS: Final = 50
ROLES: Final = [(role.value, role.value) for role in Role]
NOTICES: Final = {
    "created": "The project is created.",
    "changed": "The project is changed on all gateways within a second.",
    "archived": "The project is archived. All gateways reject its keys within a second.",
    "activated": "The project is active again.",
    "added": "The member is added.",
    "role": "The role is changed on all gateways within a second.",
    "removed": "The member is removed.",
}

router = APIRouter(route_class=TenantRoute, include_in_schema=False)

ManagesProjects = Annotated[Visitor, Depends(needs(Scope.KEYS))]
ManagesAllProjects = Annotated[Visitor, Depends(needs(Scope.KEYS, whole=True))]
ManagesMembers = Annotated[Visitor, Depends(needs(Scope.MEMBERS, whole=True))]


@router.get("/projects")
async def list_projects(
    request: Request, projects: Projects, visitor: ManagesProjects, after: AfterId = None
) -> Response:
    """List projects, newest first."""
    wanted = PageRequest(after, ROWS, is_newest_first=True)
    found = await projects.page(visitor.tenant_id, wanted, grantor=visitor.caller.grant)
    return page(
        request,
        "projects.html",
        projects=found.entries,
        following=following(found, f"{visitor.home}/projects"),
        notices=NOTICES,
    )


@router.get("/projects/new", dependencies=[Depends(needs(Scope.KEYS, whole=True))])
async def show_new_project(request: Request) -> Response:
    """Show the form of a new project."""
    return _project_form(request, {"name": ""} | fields_of({}))


@router.post("/projects/new")
async def create_project(
    request: Request, projects: Projects, visitor: ManagesAllProjects, form: SentForm
) -> Response:
    """Create a project."""
    try:
        limits = read_limits(form, LimitScope.PROJECT, is_new=True)
        values = {"name": form["name"], "limits": limits}
        await projects.create(
            visitor.tenant_id,
            **checked(ProjectCreation, values).options(),
            **visitor.caller.by,
        )
    except ApiError as error:
        return _project_form(request, form, error=error)
    return redirect(f"{visitor.home}/projects", done="created")


@router.get("/projects/{project_id}")
async def show_project(
    request: Request,
    projects: Projects,
    reports: Reports,
    visitor: ManagesProjects,
    project_id: str,
) -> Response:
    """Show a project and the use of its limits, with the form that changes it."""
    project = await projects.get(visitor.tenant_id, project_id, grantor=visitor.caller.grant)
    report = await reports.of_tenant(visitor.tenant_id, project=project.id)
    form = {"name": project.name, **fields_of(project.limits)}
    return _project_form(request, form, project, used=report.scopes[0])


@router.post("/projects/{project_id}")
async def change_project(
    request: Request,
    projects: Projects,
    visitor: ManagesAllProjects,
    *,
    project_id: str,
    form: SentForm,
) -> Response:
    """Change the name and the limits of a project."""
    project = await projects.get(visitor.tenant_id, project_id, grantor=visitor.caller.grant)
    try:
        limits = read_limits(form, LimitScope.PROJECT, is_new=False)
        values = {"name": form["name"], "limits": limits}
        await projects.update(
            visitor.tenant_id,
            project.id,
            **checked(ProjectChange, values).options(),
            **visitor.caller.by,
        )
    except ApiError as error:
        return _project_form(request, form, project, error)
    return redirect(f"{visitor.home}/projects", done="changed")


@router.get("/projects/{project_id}/archive")
async def ask_to_archive(
    request: Request, projects: Projects, visitor: ManagesAllProjects, project_id: str
) -> Response:
    """Ask for confirmation."""
    project = await projects.get(visitor.tenant_id, project_id, grantor=visitor.caller.grant)
    return confirmation(
        request,
        f"{visitor.home}/projects/{project.id}",
        "archive",
        title=f"Archive the project “{project.name}”?",
        text="All gateways reject requests with its keys within a second, until it is activated.",
        button="Archive the project",
    )


@router.post("/projects/{project_id}/archive")
async def archive_project(
    projects: Projects, visitor: ManagesAllProjects, project_id: str
) -> Response:
    """Archive a project."""
    await projects.archive(
        visitor.tenant_id,
        project_id,
        **visitor.caller.by,
    )
    return redirect(f"{visitor.home}/projects", done="archived")


@router.post("/projects/{project_id}/activate")
async def activate_project(
    projects: Projects, visitor: ManagesAllProjects, project_id: str
) -> Response:
    """Activate an archived project."""
    await projects.activate(
        visitor.tenant_id,
        project_id,
        **visitor.caller.by,
    )
    return redirect(f"{visitor.home}/projects", done="activated")


@router.get("/members")
async def list_members(
    request: Request, members: Members, visitor: ManagesMembers, after: AfterId = None
) -> Response:
    """List members, oldest first, with the form that adds one."""
    return await _members_page(request, members, visitor, after=after)


@router.post("/members")
async def add_member(
    request: Request, members: Members, visitor: ManagesMembers, form: SentForm
) -> Response:
    """Add a member."""
    try:
        values: dict[str, Any] = {name: form[name] for name in ("subject", "email", "name")}
        values = {name: value or None for name, value in values.items()}
        body = checked(MemberAddition, values | {"role": form["role"]})
        await members.add(
            visitor.tenant_id,
            **body.given(),
            **visitor.caller.by,
        )
    except ApiError as error:
        return await _members_page(request, members, visitor, form=form, error=error)
    return redirect(f"{visitor.home}/members", done="added")


@router.get("/members/{member_id}")
async def show_member(
    request: Request, members: Members, visitor: ManagesMembers, member_id: str
) -> Response:
    """Show the forms that change a member's role and remove the member."""
    member = await members.get(visitor.tenant_id, member_id)
    return page(request, "member.html", member=member, roles=ROLES, error=None)


@router.post("/members/{member_id}")
async def change_member(
    request: Request,
    members: Members,
    visitor: ManagesMembers,
    *,
    member_id: str,
    form: SentForm,
) -> Response:
    """Change a member's role, or remove the member."""
    member = await members.get(visitor.tenant_id, member_id)
    rights = visitor.caller.by
    try:
        if form["remove"] == "yes":
            await members.remove(visitor.tenant_id, member.id, **rights)
            return redirect(f"{visitor.home}/members", done="removed")
        role = checked(MemberChange, {"role": form["role"]}).role
        await members.set_role(visitor.tenant_id, member.id, role=role, **rights)
    except ApiError as error:
        return page(
            request, "member.html", status=error.status, member=member, roles=ROLES, error=error
        )
    return redirect(f"{visitor.home}/members", done="role")


def _project_form(
    request: Request,
    form: Form | dict[str, str],
    project: Project | None = None,
    error: ApiError | None = None,
    used: ScopeBody | None = None,
) -> Response:
    return page(
        request,
        "project.html",
        used=used,
        form=form,
        project=project,
        is_archived=project is not None and project.status is ProjectStatus.ARCHIVED,
        limits=labels_of(LimitScope.PROJECT),
        error=error,
    )


async def _members_page(
    request: Request,
    members: MemberService,
    visitor: Visitor,
    *,
    after: str | None = None,
    form: Form | None = None,
    error: ApiError | None = None,
) -> Response:
    found = await members.page(visitor.tenant_id, PageRequest(after, ROWS))
    return page(
        request,
        "members.html",
        members=found.entries,
        roles=ROLES,
        form=Form() if form is None else form,
        error=error,
        following=following(found, f"{visitor.home}/members"),
        notices=NOTICES,
    )
