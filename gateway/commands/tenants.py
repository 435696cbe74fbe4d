"""`sluice tenants`: the paying customers."""

from typing import Any

import click

from gateway.accounts.records import Tenant, TenantOptions
from gateway.commands.options import (
    NONE,
    changed_dialect_option,
    database_option,
    dialect_option,
    json_option,
    open_accounts,
    redis_option,
    runs_async,
    to_dialect,
)
from gateway.commands.output import print_json, print_table, show_time

EPILOG = """\
\b
Examples:
  sluice tenants create "Acme" --id acme --weight 2
  sluice tenants set acme --dialect llamacpp --strict --default-model llama-8b
  sluice tenants list
  sluice tenants suspend acme
"""


@click.group("tenants", epilog=EPILOG)
def command() -> None:
    """Create, change, list, suspend and activate tenants."""


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
@dialect_option
@click.option(
    "--strict",
    is_flag=True,
    help="Refuse parameters that would have no effect, instead of listing them in a header.",
)
@click.option("--default-model", help="The model of requests that name none.")
@json_option
@database_option
@redis_option
@runs_async
async def create(
    name: str,
    tenant_id: str | None,
    *,
    weight: float,
    dialect: str | None,
    strict: bool,
    default_model: str | None,
    as_json: bool,
    database_url: str | None,
    redis_url: str | None,
) -> None:
    """Add a tenant called NAME."""
    async with open_accounts(database_url, redis_url) as accounts:
        tenant = await accounts.tenants.create(
            name,
            tenant_id=tenant_id,
            weight=weight,
            dialect=to_dialect(dialect),
            strict_parameters=strict,
            default_model=default_model,
        )
    _print_one(tenant, as_json=as_json)


@command.command("set")
@click.argument("tenant")
@changed_dialect_option
@click.option(
    "--strict/--no-strict",
    default=None,
    help="Refuse parameters that would have no effect, or list them in a header.",
)
@click.option("--default-model", help="The model of requests that name none; none takes it away.")
@json_option
@database_option
@redis_option
@runs_async
async def set_options(
    tenant: str,
    *,
    dialect: str | None,
    strict: bool | None,
    default_model: str | None,
    as_json: bool,
    database_url: str | None,
    redis_url: str | None,
) -> None:
    """Change what is given of TENANT (its id), on every gateway within a second."""
    options = TenantOptions()
    if dialect is not None:
        options["dialect"] = to_dialect(dialect)
    if strict is not None:
        options["strict_parameters"] = strict
    if default_model is not None:
        options["default_model"] = None if default_model == NONE else default_model
    async with open_accounts(database_url, redis_url) as accounts:
        changed = await accounts.tenants.update(tenant, **options)
    _print_one(changed, as_json=as_json)


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
        ("ID", "NAME", "WEIGHT", "STATUS", "DIALECT", "STRICT", "DEFAULT MODEL", "CREATED"),
        [_to_row(tenant) for tenant in tenants],
    )


def _to_row(tenant: Tenant) -> tuple[str, ...]:
    return (
        tenant.id,
        tenant.name,
        f"{tenant.weight:g}",
        tenant.status,
        tenant.dialect or "-",
        "yes" if tenant.strict_parameters else "no",
        tenant.default_model or "-",
        show_time(tenant.created_at),
    )


def _to_json(tenant: Tenant) -> dict[str, Any]:
    return {
        "id": tenant.id,
        "name": tenant.name,
        "weight": tenant.weight,
        "status": tenant.status,
        "dialect": tenant.dialect,
        "strict_parameters": tenant.strict_parameters,
        "default_model": tenant.default_model,
        "created_at": tenant.created_at,
    }
