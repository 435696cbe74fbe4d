"""`sluice members`: the members of a tenant."""

import click

from gateway.management.members.schemas import MemberBody
from gateway.management.members.service import MemberService
from gateway.tenancy.records import Member, Role
from gateway.terminal.entities import print_bodies, print_one, tenant_option
from gateway.terminal.options import (
    Decorator,
    Stores,
    database_option,
    json_option,
    open_stores,
    redis_option,
    runs_async,
)
from gateway.terminal.output import print_table, show_time

EPILOG = """\
\b
Examples:
  sluice members add --tenant acme "auth0|0123" --role owner --name "Ada Lovelace"
  sluice members set --tenant acme "auth0|0123" --role developer
  sluice members list --tenant acme
  sluice members remove --tenant acme "auth0|0123"
"""

_role_option: Decorator = click.option(
    "--role",
    required=True,
    type=click.Choice([role.value for role in Role]),
    help="Role of the member.",
)


@click.group("members", epilog=EPILOG)
def command() -> None:
    """Add, change, list and remove the members of a tenant."""


@command.command()
@tenant_option
@click.argument("subject")
@_role_option
@click.option("--name", help="Display name.  [default: the subject]")
@json_option
@database_option
@redis_option
@runs_async
async def add(
    tenant_id: str,
    subject: str,
    *,
    role: str,
    name: str | None,
    as_json: bool,
    database_url: str | None,
    redis_url: str | None,
) -> None:
    """Add the person whose tokens have SUBJECT as their `sub` claim as a member."""
    async with open_stores(database_url, redis_url) as stores:
        member = await _service(stores).add(
            tenant_id, subject=subject, role=Role(role), name=name, actor=stores.actor
        )
    _print_changed(member, as_json=as_json)


@command.command("set")
@tenant_option
@click.argument("member")
@_role_option
@json_option
@database_option
@redis_option
@runs_async
async def set_role(
    tenant_id: str,
    member: str,
    *,
    role: str,
    as_json: bool,
    database_url: str | None,
    redis_url: str | None,
) -> None:
    """Change the role of MEMBER (id or subject); the last owner keeps its role."""
    async with open_stores(database_url, redis_url) as stores:
        changed = await _service(stores).set_role(
            tenant_id, member, role=Role(role), actor=stores.actor
        )
    _print_changed(changed, as_json=as_json)


@command.command("list")
@tenant_option
@json_option
@database_option
@runs_async
async def list_members(tenant_id: str, *, as_json: bool, database_url: str | None) -> None:
    """List the members of a tenant."""
    async with open_stores(database_url, None) as stores:
        members = await _service(stores).list_of_tenant(tenant_id)
    if as_json:
        print_bodies(map(MemberBody.of, members))
    else:
        _print_table(members)


@command.command()
@tenant_option
@click.argument("member")
@database_option
@redis_option
@runs_async
async def remove(
    tenant_id: str, member: str, *, database_url: str | None, redis_url: str | None
) -> None:
    """Remove MEMBER (id or subject) from the tenant; the last owner stays."""
    async with open_stores(database_url, redis_url) as stores:
        removed = await _service(stores).remove(tenant_id, member, actor=stores.actor)
    click.echo(f"Removed {removed.id} ({removed.subject}).")


def _service(stores: Stores) -> MemberService:
    return MemberService(stores.database, stores.announcer)


def _print_changed(member: Member, *, as_json: bool) -> None:
    if as_json:
        print_one(MemberBody.of(member), as_json=True)
    else:
        _print_table([member])


def _print_table(members: list[Member]) -> None:
    print_table(
        ("ID", "SUBJECT", "NAME", "ROLE", "ADDED"),
        [
            (member.id, member.subject, member.name, member.role, show_time(member.created_at))
            for member in members
        ],
    )
