"""`sluice plans`: default limits for groups of tenants."""

import re
from collections.abc import Iterable
from typing import Any, Final

import click

from gateway.management.plans.service import PlanService, ScopedLimits
from gateway.tenancy.limits import LimitScope, LimitValues, read_limits
from gateway.tenancy.records import Plan
from gateway.terminal.entities import LIMITS_HELP, prints, show_limits, table
from gateway.terminal.options import NONE, Decorator, Stores, with_database, with_stores
from gateway.terminal.output import print_table, show_time

EPILOG = f"""\
\b
Examples:
  sluice plans create starter --key-limit requests_per_minute=60
  sluice plans set starter --tenant-limit budget_micros=50000000
  sluice plans set starter --key-limit requests_per_minute=none
  sluice plans list

{LIMITS_HELP}"""

_NUMBER: Final = re.compile(r"[0-9]{1,20}")


def _limit_option(scope: LimitScope) -> Decorator:
    return click.option(
        f"--{scope}-limit",
        f"{scope}_limits",
        multiple=True,
        metavar="NAME=VALUE",
        help=f"Default limit of each {scope}, repeatable; {NONE} removes it.",
    )


_tenant_option = _limit_option(LimitScope.TENANT)
_project_option = _limit_option(LimitScope.PROJECT)
_key_option = _limit_option(LimitScope.KEY)


_COLUMNS = (LimitScope.TENANT, LimitScope.PROJECT, LimitScope.KEY)


def _to_json(plan: Plan) -> dict[str, Any]:
    return {
        "id": plan.id,
        "name": plan.name,
        **{f"{scope}_limits": plan.limits[scope] for scope in _COLUMNS},
        "created_at": plan.created_at,
    }


def _to_row(plan: Plan) -> tuple[str, ...]:
    limits = (show_limits(plan.limits[scope]) for scope in _COLUMNS)
    return (plan.id, plan.name, *limits, show_time(plan.created_at))


def _print_limits(plan: Plan) -> None:
    click.echo(f"{plan.id}: {plan.name}")
    print_table(
        ("SCOPE", "LIMIT", "VALUE"),
        [
            (scope, name, str(value))
            for scope in LimitScope
            for name, value in plan.limits[scope].items()
        ],
    )


_prints = prints(
    table(("ID", "NAME", "TENANT LIMITS", "PROJECT LIMITS", "KEY LIMITS", "CREATED"), _to_row),
    _to_json,
)


@click.group("plans", epilog=EPILOG)
def command() -> None:
    """Create, change and list plans: default limits for groups of tenants."""


@command.command()
@click.argument("plan")
@click.option("--name", help="Display name.  [default: the id]")
@_tenant_option
@_project_option
@_key_option
@_prints
@with_stores
async def create(stores: Stores, plan: str, *, name: str | None, **limits: tuple[str, ...]) -> Plan:
    """Add a plan with the id PLAN. `sluice tenants set TENANT --plan PLAN` uses it."""
    scoped = _scoped(limits)
    return await _service(stores).create(plan, name=name, limits=scoped, actor=stores.actor)


@command.command("set")
@click.argument("plan")
@click.option("--name", help="Display name.")
@_tenant_option
@_project_option
@_key_option
@_prints
@with_stores
async def set_options(
    stores: Stores, plan: str, *, name: str | None, **limits: tuple[str, ...]
) -> Plan:
    """Change the given settings of PLAN on every gateway within a second."""
    scoped = _scoped(limits)
    return await _service(stores).update(plan, name=name, limits=scoped, actor=stores.actor)


@command.command("list")
@_prints
@with_database
async def list_plans(stores: Stores) -> list[Plan]:
    """List all plans."""
    return await _service(stores).list_all()


@command.command()
@click.argument("plan")
@prints(_print_limits, _to_json)
@with_database
async def show(stores: Stores, plan: str) -> Plan:
    """Show PLAN with all its limits."""
    return await _service(stores).get(plan)


def _service(stores: Stores) -> PlanService:
    return PlanService(stores.database, stores.announcer)


def _scoped(limits: dict[str, tuple[str, ...]]) -> ScopedLimits:
    return {scope: _read(limits[f"{scope}_limits"], scope) for scope in LimitScope}


def _read(given: Iterable[str], scope: LimitScope) -> LimitValues:
    values: dict[str, Any] = {}
    for each in given:
        name, _, value = each.partition("=")
        is_number = _NUMBER.fullmatch(value) is not None
        values[name.strip()] = None if value == NONE else int(value) if is_number else value
    return read_limits(values, param=f"{scope}_limits")
