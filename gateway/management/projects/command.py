"""`sluice projects`: parts of a tenant with their own keys and limits."""

import click

from gateway.management.projects.schemas import ProjectBody
from gateway.management.projects.service import ProjectService
from gateway.tenancy.records import Project, ProjectChanges
from gateway.terminal.entities import (
    LIMITS_HELP,
    limit_option,
    print_bodies,
    print_one,
    show_limits,
    tenant_option,
    to_limits,
)
from gateway.terminal.options import (
    Stores,
    database_option,
    json_option,
    open_stores,
    redis_option,
    runs_async,
)
from gateway.terminal.output import print_table, show_time

EPILOG = f"""\
\b
Examples:
  sluice projects create --tenant acme "web shop" --limit tokens_per_day=1000000
  sluice projects set --tenant acme prj_0123456789abcdef --limit tokens_per_day=plan
  sluice projects list --tenant acme
  sluice projects archive --tenant acme prj_0123456789abcdef

{LIMITS_HELP}"""


@click.group("projects", epilog=EPILOG)
def command() -> None:
    """Create, change, list, archive and activate projects."""


@command.command()
@tenant_option
@click.argument("name")
@limit_option
@json_option
@database_option
@redis_option
@runs_async
async def create(
    tenant_id: str,
    name: str,
    *,
    limits: tuple[str, ...],
    as_json: bool,
    database_url: str | None,
    redis_url: str | None,
) -> None:
    """Create a project called NAME for a tenant."""
    async with open_stores(database_url, redis_url) as stores:
        project = await _service(stores).create(
            tenant_id, name=name, limits=to_limits(limits), actor=stores.actor
        )
    _print_changed(project, as_json=as_json)


@command.command("set")
@tenant_option
@click.argument("project")
@click.option("--name", help="Display name.")
@limit_option
@json_option
@database_option
@redis_option
@runs_async
async def set_options(
    tenant_id: str,
    project: str,
    *,
    name: str | None,
    limits: tuple[str, ...],
    as_json: bool,
    database_url: str | None,
    redis_url: str | None,
) -> None:
    """Change the given settings of PROJECT (its id) on every gateway within a second."""
    options = ProjectChanges()
    if name is not None:
        options["name"] = name
    if limits:
        options["limits"] = to_limits(limits)
    async with open_stores(database_url, redis_url) as stores:
        changed = await _service(stores).update(tenant_id, project, actor=stores.actor, **options)
    _print_changed(changed, as_json=as_json)


@command.command("list")
@tenant_option
@json_option
@database_option
@runs_async
async def list_projects(tenant_id: str, *, as_json: bool, database_url: str | None) -> None:
    """List the projects of a tenant, including archived ones."""
    async with open_stores(database_url, None) as stores:
        projects = await _service(stores).list_of_tenant(tenant_id)
    if as_json:
        print_bodies(map(ProjectBody.of, projects))
    else:
        _print_table(projects)


@command.command()
@tenant_option
@click.argument("project")
@json_option
@database_option
@redis_option
@runs_async
async def archive(
    tenant_id: str, project: str, *, as_json: bool, database_url: str | None, redis_url: str | None
) -> None:
    """Archive PROJECT (its id): reject requests with its keys from now on."""
    async with open_stores(database_url, redis_url) as stores:
        archived = await _service(stores).archive(tenant_id, project, actor=stores.actor)
    _print_changed(archived, as_json=as_json)


@command.command()
@tenant_option
@click.argument("project")
@json_option
@database_option
@redis_option
@runs_async
async def activate(
    tenant_id: str, project: str, *, as_json: bool, database_url: str | None, redis_url: str | None
) -> None:
    """Activate the archived PROJECT (its id): its keys work again."""
    async with open_stores(database_url, redis_url) as stores:
        activated = await _service(stores).activate(tenant_id, project, actor=stores.actor)
    _print_changed(activated, as_json=as_json)


def _service(stores: Stores) -> ProjectService:
    return ProjectService(stores.database, stores.announcer)


def _print_changed(project: Project, *, as_json: bool) -> None:
    if as_json:
        print_one(ProjectBody.of(project), as_json=True)
    else:
        _print_table([project])


def _print_table(projects: list[Project]) -> None:
    print_table(
        ("ID", "NAME", "STATUS", "LIMITS", "CREATED"),
        [
            (
                project.id,
                project.name,
                project.status,
                show_limits(project.limits),
                show_time(project.created_at),
            )
            for project in projects
        ],
    )
