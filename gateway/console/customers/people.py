"""Projects and members of a tenant."""

from collections import defaultdict
from typing import Annotated, Any, Final

from fastapi import APIRouter, Depends, Response

from gateway.accounts.limits import LimitReports, ScopeBody
from gateway.accounts.members import MemberAddition, MemberChange, Members
from gateway.accounts.projects.routes import ProjectChange, ProjectCreation, Projects
from gateway.console.forms import Form, checked, values_of
from gateway.console.limit_fields import fields_of, limit_group, read_limits
from gateway.console.lists import Newest
from gateway.console.routing import FORM, TenantRoute, needs, redirect
from gateway.console.tables import Action, Adding, Cell, Column, Field, pairs
from gateway.console.visitor import Visitor
from gateway.records.limits import LimitScope
from gateway.records.records import Project, ProjectStatus
from gateway.records.scopes import Role, Scope

SEES_USAGE: Final = (Scope.USAGE, Scope.COMPLETIONS)
MEMBERS: Final = (
    "People of the identity provider, who log in to this console or use the API with a JWT. A "
    "member who was added by e-mail is the person who first logs in with this address. Once there "
    "are members, tokens of other subjects are rejected. Keys are not affected."
)
MEMBER_FIELDS: Final = (
    Field("email", "E-mail", type="email"),
    Field("subject", "or subject"),
    Field("name", "Name"),
    Field("role", "Role", options=pairs(Role), default=Role.DEVELOPER.value),
)
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

KeyManager = Annotated[Visitor, Depends(needs(Scope.KEYS))]
WholeKeyManager = Annotated[Visitor, Depends(needs(Scope.KEYS, whole=True))]
MemberManager = Annotated[Visitor, Depends(needs(Scope.MEMBERS, whole=True))]


@router.get("/projects")
async def list_projects(visitor: KeyManager, projects: Projects, wanted: Newest) -> Response:
    """List projects, newest first."""
    home, sees_usage = f"{visitor.home}/projects", visitor.tenant or visitor.has(*SEES_USAGE)

    def usage(project: Project) -> Cell:
        href = f"/console/usage?{visitor.of_tenant}project={project.id}"
        return Cell("usage", href, label=f"Usage of {project.name}") if sees_usage else Cell("")

    return visitor.list_page(
        "Projects",
        (
            Column("Name", lambda each: Cell(each.name, f"{home}/{each.id}"), "name"),
            Column("Id", lambda each: each.id, "mono wide"),
            Column("Status", _status),
            Column("Created (UTC)", lambda each: each.created_at, "time wide"),
            Column("Usage", usage),
        ),
        await projects.page(visitor.tenant_id, wanted, grantor=visitor.caller.grant),
        "There is no project.",
        action=None if visitor.principal.project_id else Action("Create a project", f"{home}/new"),
        text="A project is a part of the account with keys and limits of its own.",
        notices=NOTICES,
    )


@router.api_route("/projects/new", methods=FORM)
async def create_project(visitor: WholeKeyManager, projects: Projects) -> Response:
    """Create a project."""
    if not visitor.form.is_sent:
        return _project_form(visitor)
    options = checked(ProjectCreation, _values(visitor.form, is_new=True)).options()
    await projects.create(visitor.tenant_id, **options, **visitor.caller.by)
    return redirect(f"{visitor.home}/projects", done="created")


@router.api_route("/projects/{project_id}", methods=FORM)
async def change_project(visitor: KeyManager, projects: Projects, project_id: str) -> Response:
    """Show a project and the use of its limits; change its name and limits."""
    project = await projects.get(visitor.tenant_id, project_id, grantor=visitor.caller.grant)
    if not visitor.form.is_sent:
        reports = visitor.make(LimitReports)
        report = await reports.of_tenant(visitor.tenant_id, project=project.id)
        return _project_form(visitor, project, used=report.scopes[0])
    visitor.require_whole()
    options = checked(ProjectChange, _values(visitor.form, is_new=False)).options()
    await projects.update(visitor.tenant_id, project.id, **options, **visitor.caller.by)
    return redirect(f"{visitor.home}/projects", done="changed")


@router.api_route("/projects/{project_id}/archive", methods=FORM)
async def archive(visitor: WholeKeyManager, projects: Projects, project_id: str) -> Response:
    """Ask for confirmation, then archive a project."""
    project = await projects.get(visitor.tenant_id, project_id, grantor=visitor.caller.grant)
    if visitor.form.is_sent:
        await projects.archive(visitor.tenant_id, project.id, **visitor.caller.by)
        return redirect(f"{visitor.home}/projects", done="archived")
    return visitor.confirmation(
        "Archive the project",
        of=project.name,
        text="All gateways reject requests with its keys within a second, until it is activated.",
    )


@router.post("/projects/{project_id}/activate")
async def activate(visitor: WholeKeyManager, projects: Projects, project_id: str) -> Response:
    """Activate an archived project."""
    await projects.activate(visitor.tenant_id, project_id, **visitor.caller.by)
    return redirect(f"{visitor.home}/projects", done="activated")


@router.api_route("/members", methods=FORM)
async def list_members(visitor: MemberManager, members: Members, wanted: Newest) -> Response:
    """List members, newest first; add one."""
    form, home = visitor.form, f"{visitor.home}/members"
    if form.is_sent:
        body = checked(MemberAddition, values_of(MEMBER_FIELDS, form, is_new=False))
        await members.add(visitor.tenant_id, **body.given(), **visitor.caller.by)
        return redirect(home, done="added")
    return visitor.list_page(
        "Members",
        (
            Column("Name", lambda each: Cell(each.name, f"{home}/{each.id}"), "name"),
            Column("E-mail", lambda each: each.email, "wide"),
            Column("Subject", lambda each: each.subject or "not logged in yet", "mono wide"),
            Column("Role", lambda each: each.role),
            Column("Added (UTC)", lambda each: each.created_at, "time wide"),
        ),
        await members.page(visitor.tenant_id, wanted),
        "There is no member.",
        text=MEMBERS,
        adding=Adding("Add a member", MEMBER_FIELDS, form, "Add the member"),
        notices=NOTICES,
    )


@router.api_route("/members/{member_id}", methods=FORM)
async def change_member(visitor: MemberManager, members: Members, member_id: str) -> Response:
    """Show a member; change the member's role, or remove the member."""
    member, form = await members.get(visitor.tenant_id, member_id), visitor.form
    if not form.is_sent:
        return visitor.page("member.html", member=member, roles=pairs(Role))
    home, rights = f"{visitor.home}/members", visitor.caller.by
    if form["remove"] == "yes":
        await members.remove(visitor.tenant_id, member.id, **rights)
        return redirect(home, done="removed")
    role = checked(MemberChange, {"role": form["role"]}).role
    await members.set_role(visitor.tenant_id, member.id, role=role, **rights)
    return redirect(home, done="role")


def _project_form(
    visitor: Visitor, project: Project | None = None, used: ScopeBody | None = None
) -> Response:
    own = {} if project is None else {"name": project.name, **fields_of(project.limits)}
    return visitor.page(
        "project.html",
        used=used,
        form=defaultdict(str, visitor.form or own),
        project=project,
        is_archived=project is not None and _is_archived(project),
        limits=limit_group(LimitScope.PROJECT),
    )


def _values(form: Form, *, is_new: bool) -> dict[str, Any]:
    return {"name": form["name"], "limits": read_limits(form, LimitScope.PROJECT, is_new=is_new)}


def _status(project: Project) -> Cell:
    return Cell(project.status, kind="warn" if _is_archived(project) else "good")


def _is_archived(project: Project) -> bool:
    return project.status is ProjectStatus.ARCHIVED
