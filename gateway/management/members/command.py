"""`sluice members`: the members of a tenant."""

import click

from gateway.management.members.schemas import MemberBody
from gateway.management.members.service import MemberService
from gateway.tenancy.records import Member, Role
from gateway.terminal.entities import prints, table, tenant_option
from gateway.terminal.options import Decorator, Stores, with_database, with_stores
from gateway.terminal.output import show_time

EPILOG = """\
\b
Examples:
  sluice members add --tenant acme --email ada@acme.example --role owner
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


def _to_row(member: Member) -> tuple[str, ...]:
    return (
        member.id,
        member.subject or member.email or "",
        member.name,
        member.role,
        show_time(member.created_at),
    )


_prints = prints(table(("ID", "SUBJECT", "NAME", "ROLE", "ADDED"), _to_row), MemberBody.of)


@click.group("members", epilog=EPILOG)
def command() -> None:
    """Add, change, list and remove the members of a tenant."""


@command.command()
@tenant_option
@click.argument("subject", required=False)
@click.option("--email", help="E-mail of the person, instead of SUBJECT.")
@_role_option
@click.option("--name", help="Display name.  [default: the subject or e-mail]")
@_prints
@with_stores
async def add(
    stores: Stores,
    tenant_id: str,
    *,
    subject: str | None,
    email: str | None,
    role: str,
    name: str | None,
) -> Member:
    """Add the person whose tokens have SUBJECT as their `sub` claim as a member.

    With --email, the member is the person who first logs in to the console with this address,
    verified by the identity provider.
    """
    return await _service(stores).add(
        tenant_id, subject=subject, email=email, role=Role(role), name=name, actor=stores.actor
    )


@command.command("set")
@tenant_option
@click.argument("member")
@_role_option
@_prints
@with_stores
async def set_role(stores: Stores, tenant_id: str, member: str, *, role: str) -> Member:
    """Change the role of MEMBER (id, subject or e-mail); the last owner keeps its role."""
    return await _service(stores).set_role(tenant_id, member, role=Role(role), actor=stores.actor)


@command.command("list")
@tenant_option
@_prints
@with_database
async def list_members(stores: Stores, tenant_id: str) -> list[Member]:
    """List the members of a tenant."""
    return await _service(stores).list_of_tenant(tenant_id)


@command.command()
@tenant_option
@click.argument("member")
@with_stores
async def remove(stores: Stores, tenant_id: str, member: str) -> None:
    """Remove MEMBER (id, subject or e-mail) from the tenant; the last owner stays."""
    removed = await _service(stores).remove(tenant_id, member, actor=stores.actor)
    click.echo(f"Removed {removed.id} ({removed.subject or removed.email}).")


def _service(stores: Stores) -> MemberService:
    return MemberService(stores.database, stores.announcer)
