"""`sluice projects`: parts of a tenant with their own keys and limits."""

import click

from gateway.management.projects.schemas import ProjectBody
from gateway.management.projects.service import ProjectService
from gateway.tenancy.records import Project, ProjectChanges
from gateway.terminal.entities import (
    LIMITS_HELP,
    limit_option,
    prints,
    show_limits,
    table,
    tenant_option,
    to_limits,
)
from gateway.terminal.options import Stores, with_database, with_stores
from gateway.terminal.output import show_time

EPILOG = f"""\
\b
Examples:
  sluice projects create --tenant acme "web shop" --limit tokens_per_day=1000000
  sluice projects set --tenant acme prj_0123456789abcdef --limit tokens_per_day=plan
  sluice projects list --tenant acme
  sluice projects archive --tenant acme prj_0123456789abcdef

{LIMITS_HELP}"""


def _to_row(project: Project) -> tuple[str, ...]:
    return (
        project.id,
        project.name,
        project.status,
        show_limits(project.limits),
        show_time(project.created_at),
    )


_prints = prints(table(("ID", "NAME", "STATUS", "LIMITS", "CREATED"), _to_row), ProjectBody.of)


@click.group("projects", epilog=EPILOG)
def command() -> None:
    """Create, change, list, archive and activate projects."""


@command.command()
@tenant_option
@click.argument("name")
@limit_option
@_prints
@with_stores
async def create(stores: Stores, tenant_id: str, name: str, *, limits: tuple[str, ...]) -> Project:
    """Create a project called NAME for a tenant."""
    return await _service(stores).create(
        tenant_id, name=name, limits=to_limits(limits), actor=stores.actor
    )


@command.command("set")
@tenant_option
@click.argument("project")
@click.option("--name", help="Display name.")
@limit_option
@_prints
@with_stores
async def set_options(
    stores: Stores, tenant_id: str, project: str, *, name: str | None, limits: tuple[str, ...]
) -> Project:
    """Change the given settings of PROJECT (its id) on every gateway within a second."""
    options = ProjectChanges()
    if name is not None:
        options["name"] = name
    if limits:
        options["limits"] = to_limits(limits)
    return await _service(stores).update(tenant_id, project, actor=stores.actor, **options)


@command.command("list")
@tenant_option
@_prints
@with_database
async def list_projects(stores: Stores, tenant_id: str) -> list[Project]:
    """List the projects of a tenant, including archived ones."""
    return await _service(stores).list_of_tenant(tenant_id)


@command.command()
@tenant_option
@click.argument("project")
@_prints
@with_stores
async def archive(stores: Stores, tenant_id: str, project: str) -> Project:
    """Archive PROJECT (its id): reject requests with its keys from now on."""
    return await _service(stores).archive(tenant_id, project, actor=stores.actor)


@command.command()
@tenant_option
@click.argument("project")
@_prints
@with_stores
async def activate(stores: Stores, tenant_id: str, project: str) -> Project:
    """Activate the archived PROJECT (its id): its keys work again."""
    return await _service(stores).activate(tenant_id, project, actor=stores.actor)


def _service(stores: Stores) -> ProjectService:
    return ProjectService(stores.database, stores.announcer)
