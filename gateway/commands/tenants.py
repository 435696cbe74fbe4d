"""`sluice tenants`: the paying customers."""

from typing import Any

import click

from gateway.accounts.records import Tenant
from gateway.commands.options import (
    database_option,
    json_option,
    open_accounts,
    redis_option,
    runs_async,
)
from gateway.commands.output import print_json, print_table, show_time

EPILOG = """\
\b
Examples:
  sluice tenants create "Acme" --id acme --weight 2
  sluice tenants list
  sluice tenants suspend acme
"""


@click.group("tenants", epilog=EPILOG)
def command() -> None:
    """Create, list, suspend and activate tenants."""


@command.command()
@click.argument("name")
@click.option("--id", "tenant_id", help="1 to 63 of a-z, 0-9 and '-'; random if not given.")
@click.option(
    "--weight",
    type=float,
    default=1.0,
    show_default=True,
    help="Share of the workers relative to other tenants that have work waiting.",
)
@json_option
@database_option
@redis_option
@runs_async
async def create(
    name: str,
    tenant_id: str | None,
    *,
    weight: float,
    as_json: bool,
    database_url: str | None,
    redis_url: str | None,
) -> None:
    """Add a tenant called NAME."""
    async with open_accounts(database_url, redis_url) as accounts:
        tenant = await accounts.tenants.create(name, tenant_id=tenant_id, weight=weight)
    _print_one(tenant, as_json=as_json)


@command.command("list")
@json_option
@database_option
@runs_async
async def list_tenants(*, as_json: bool, database_url: str | None) -> None:
    """Show all tenants."""
    async with open_accounts(database_url, None) as accounts:
        tenants = await accounts.tenants.list_all()
    if as_json:
        print_json([_to_json(tenant) for tenant in tenants])
    else:
        _print_table(tenants)


@command.command()
@click.argument("tenant")
@json_option
@database_option
@redis_option
@runs_async
async def suspend(
    tenant: str, *, as_json: bool, database_url: str | None, redis_url: str | None
) -> None:
    """Refuse all requests of TENANT (its id) from now on."""
    async with open_accounts(database_url, redis_url) as accounts:
        suspended = await accounts.tenants.suspend(tenant)
    _print_one(suspended, as_json=as_json)


@command.command()
@click.argument("tenant")
@json_option
@database_option
@redis_option
@runs_async
async def activate(
    tenant: str, *, as_json: bool, database_url: str | None, redis_url: str | None
) -> None:
    """Serve TENANT (its id) again."""
    async with open_accounts(database_url, redis_url) as accounts:
        activated = await accounts.tenants.activate(tenant)
    _print_one(activated, as_json=as_json)


def _print_one(tenant: Tenant, *, as_json: bool) -> None:
    if as_json:
        print_json(_to_json(tenant))
    else:
        _print_table([tenant])


def _print_table(tenants: list[Tenant]) -> None:
    print_table(
        ("ID", "NAME", "WEIGHT", "STATUS", "CREATED"),
        [(t.id, t.name, f"{t.weight:g}", t.status, show_time(t.created_at)) for t in tenants],
    )


def _to_json(tenant: Tenant) -> dict[str, Any]:
    return {
        "id": tenant.id,
        "name": tenant.name,
        "weight": tenant.weight,
        "status": tenant.status,
        "created_at": tenant.created_at,
    }
