"""`sluice tenants`: the customers of this deployment."""

from typing import Any

import click

from contract.tier import REQUEST_TIERS, ServiceTier
from gateway.management.tenants.schemas import TenantBody
from gateway.management.tenants.service import TenantService
from gateway.tenancy.records import Billing, Tenant
from gateway.terminal.entities import (
    LIMITS_HELP,
    limit_option,
    print_fields,
    prints,
    table,
    to_limits,
)
from gateway.terminal.options import (
    NONE,
    Decorator,
    Stores,
    changed_dialect_option,
    dialect_option,
    to_dialect,
    with_database,
    with_stores,
)
from gateway.terminal.output import show_time

EPILOG = f"""\
\b
Examples:
  sluice tenants create "Acme" --id acme --weight 2 --plan starter
  sluice tenants set acme --dialect llamacpp --strict --default-model llama-8b
  sluice tenants set acme --limit requests_per_minute=600 --limit budget_micros=none
  sluice tenants set acme --billing prepaid --service-tier priority --show-cost
  sluice tenants set acme --cors-origin https://app.example.com
  sluice tenants set acme --stripe-customer cus_NciAYcXfLnqBoz
  sluice tenants list
  sluice tenants show acme
  sluice tenants suspend acme

{LIMITS_HELP}"""

_billing_option: Decorator = click.option(
    "--billing", type=click.Choice([each.value for each in Billing]), help="How the tenant pays."
)
_tier_option: Decorator = click.option(
    "--service-tier",
    type=click.Choice([each.value for each in REQUEST_TIERS]),
    help="Service tier of requests that specify none.",
)
_cost_option: Decorator = click.option(
    "--show-cost/--no-show-cost",
    "shows_cost",
    default=None,
    help="Whether responses include their cost.",
)
_origin_option: Decorator = click.option(
    "--cors-origin",
    "cors_origins",
    multiple=True,
    metavar="ORIGIN",
    help="Origin of web pages that may use the tenant's keys, repeatable; *: any; none: none.",
)
_customer_option: Decorator = click.option(
    "--stripe-customer",
    "stripe_customer_id",
    metavar="ID",
    help="Customer in Stripe to whom the usage is exported; none removes it.",
)
_strict_option: Decorator = click.option(
    "--strict/--no-strict",
    "strict_parameters",
    default=None,
    help="Reject parameters without effect, or list them in a header.",
)
_weight_option: Decorator = click.option(
    "--weight",
    type=float,
    help="Share of the workers relative to other tenants with waiting jobs; initially 1.",
)


def _tenants(stores: Stores) -> TenantService:
    return TenantService(stores.database, stores.announcer)


def _to_row(tenant: Tenant) -> tuple[str, ...]:
    return (
        tenant.id,
        tenant.name,
        f"{tenant.weight:g}",
        tenant.status,
        tenant.dialect or "-",
        "yes" if tenant.strict_parameters else "no",
        tenant.default_model or "-",
        tenant.plan_id or "-",
        tenant.billing,
        tenant.service_tier,
        show_time(tenant.created_at),
    )


_prints = prints(
    table(
        (
            *("ID", "NAME", "WEIGHT", "STATUS", "DIALECT", "STRICT", "DEFAULT MODEL"),
            *("PLAN", "BILLING", "TIER", "CREATED"),
        ),
        _to_row,
    ),
    TenantBody.of,
)


@click.group("tenants", epilog=EPILOG)
def command() -> None:
    """Create, change, list, show, suspend and activate tenants."""


@command.command()
@click.argument("name")
@click.option(
    "--id", "tenant_id", help="1 to 63 characters from a-z, 0-9 and '-'.  [default: random]"
)
@_weight_option
@dialect_option
@_strict_option
@click.option("--default-model", help="Model of requests that specify none.")
@click.option("--plan", "plan_id", help="Plan whose limits apply where no own limit is set.")
@limit_option
@_billing_option
@_tier_option
@_cost_option
@_origin_option
@_customer_option
@_prints
@with_stores
async def create(stores: Stores, name: str, tenant_id: str | None, **given: Any) -> Tenant:
    """Create a tenant called NAME."""
    return await _tenants(stores).create(
        name, tenant_id=tenant_id, actor=stores.actor, **_changes(given)
    )


@command.command("set")
@click.argument("tenant")
@click.option("--name", help="Display name.")
@_weight_option
@changed_dialect_option
@_strict_option
@click.option("--default-model", help="Model of requests that specify none; none removes it.")
@click.option(
    "--plan",
    "plan_id",
    help="Plan whose limits apply where no own limit is set; none removes it.",
)
@limit_option
@_billing_option
@_tier_option
@_cost_option
@_origin_option
@_customer_option
@_prints
@with_stores
async def set_options(stores: Stores, tenant: str, **given: Any) -> Tenant:
    """Change the given settings of TENANT (its id) on every gateway within a second."""
    return await _tenants(stores).update(tenant, actor=stores.actor, **_changes(given))


@command.command("list")
@_prints
@with_database
async def list_tenants(stores: Stores) -> list[Tenant]:
    """List all tenants."""
    return await _tenants(stores).list_all()


@command.command()
@click.argument("tenant")
@prints(print_fields)
@with_database
async def show(stores: Stores, tenant: str) -> TenantBody:
    """Show all settings of TENANT (its id)."""
    return TenantBody.of(await _tenants(stores).get(tenant))


@command.command()
@click.argument("tenant")
@_prints
@with_stores
async def suspend(stores: Stores, tenant: str) -> Tenant:
    """Suspend TENANT (its id): reject all its requests from now on."""
    return await _tenants(stores).suspend(tenant, actor=stores.actor)


@command.command()
@click.argument("tenant")
@_prints
@with_stores
async def activate(stores: Stores, tenant: str) -> Tenant:
    """Activate TENANT (its id): serve its requests again."""
    return await _tenants(stores).activate(tenant, actor=stores.actor)


def _changes(given: dict[str, Any]) -> dict[str, Any]:
    """Return the given options; `none` removes a value."""
    options = {name: value for name, value in given.items() if value not in (None, ())}
    for name in ("default_model", "plan_id", "stripe_customer_id"):
        if options.get(name) == NONE:
            options[name] = None
    if options.get("cors_origins") == (NONE,):
        options["cors_origins"] = ()
    if "limits" in options:
        options["limits"] = to_limits(options["limits"])
    if "dialect" in options:
        options["dialect"] = to_dialect(options["dialect"])
    if "billing" in options:
        options["billing"] = Billing(options["billing"])
    if "service_tier" in options:
        options["service_tier"] = ServiceTier(options["service_tier"])
    return options
