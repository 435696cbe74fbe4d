"""`sluice plans`: default limits for groups of tenants."""

import re
from collections.abc import Iterable
from typing import Any, Final

import click

from gateway.management.plans.service import PlanService, ScopedLimits
from gateway.tenancy.limits import LimitName, LimitScope, LimitValues, read_limits
from gateway.tenancy.records import Plan
from gateway.terminal.options import (
    NONE,
    Decorator,
    Stores,
    database_option,
    json_option,
    open_stores,
    redis_option,
    runs_async,
)
from gateway.terminal.output import print_json, print_table, show_time

EPILOG = f"""\
\b
Examples:
  sluice plans create starter --key-limit requests_per_minute=60
  sluice plans set starter --tenant-limit budget_micros=50000000
  sluice plans set starter --key-limit requests_per_minute=none
  sluice plans list

\b
Limits: {", ".join(tuple(LimitName)[:4])},
  {", ".join(tuple(LimitName)[4:])}.
"""

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


@click.group("plans", epilog=EPILOG)
def command() -> None:
    """Create, change and list plans: default limits for groups of tenants."""


@command.command()
@click.argument("plan")
@click.option("--name", help="Display name.  [default: the id]")
@_tenant_option
@_project_option
@_key_option
@json_option
@database_option
@redis_option
@runs_async
async def create(
    plan: str,
    *,
    name: str | None,
    as_json: bool,
    database_url: str | None,
    redis_url: str | None,
    **limits: tuple[str, ...],
) -> None:
    """Add a plan with the id PLAN. `sluice tenants set TENANT --plan PLAN` uses it."""
    scoped = _scoped(limits)
    async with open_stores(database_url, redis_url) as stores:
        created = await _service(stores).create(plan, name=name, limits=scoped, actor=stores.actor)
    _print_one(created, as_json=as_json)


@command.command("set")
@click.argument("plan")
@click.option("--name", help="Display name.")
@_tenant_option
@_project_option
@_key_option
@json_option
@database_option
@redis_option
@runs_async
async def set_options(
    plan: str,
    *,
    name: str | None,
    as_json: bool,
    database_url: str | None,
    redis_url: str | None,
    **limits: tuple[str, ...],
) -> None:
    """Change the given settings of PLAN on every gateway within a second."""
    scoped = _scoped(limits)
    async with open_stores(database_url, redis_url) as stores:
        changed = await _service(stores).update(plan, name=name, limits=scoped, actor=stores.actor)
    _print_one(changed, as_json=as_json)


@command.command("list")
@json_option
@database_option
@runs_async
async def list_plans(*, as_json: bool, database_url: str | None) -> None:
    """List all plans."""
    async with open_stores(database_url, None) as stores:
        plans = await _service(stores).list_all()
    if as_json:
        print_json([_to_json(plan) for plan in plans])
    else:
        _print_table(plans)


@command.command()
@click.argument("plan")
@json_option
@database_option
@runs_async
async def show(plan: str, *, as_json: bool, database_url: str | None) -> None:
    """Show PLAN with all its limits."""
    async with open_stores(database_url, None) as stores:
        found = await _service(stores).get(plan)
    if as_json:
        print_json(_to_json(found))
        return
    click.echo(f"{found.id}: {found.name}")
    print_table(
        ("SCOPE", "LIMIT", "VALUE"),
        [
            (scope, name, str(value))
            for scope in LimitScope
            for name, value in found.limits[scope].items()
        ],
    )


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


def _print_one(plan: Plan, *, as_json: bool) -> None:
    if as_json:
        print_json(_to_json(plan))
    else:
        _print_table([plan])


def _print_table(plans: list[Plan]) -> None:
    print_table(
        ("ID", "NAME", "TENANT LIMITS", "PROJECT LIMITS", "KEY LIMITS", "CREATED"),
        [
            (
                plan.id,
                plan.name,
                *(_show_limits(plan.limits[scope]) for scope in _COLUMNS),
                show_time(plan.created_at),
            )
            for plan in plans
        ],
    )


_COLUMNS = (LimitScope.TENANT, LimitScope.PROJECT, LimitScope.KEY)


def _show_limits(limits: LimitValues) -> str:
    return ",".join(f"{name}={value}" for name, value in limits.items()) or "-"


def _to_json(plan: Plan) -> dict[str, Any]:
    return {
        "id": plan.id,
        "name": plan.name,
        **{f"{scope}_limits": plan.limits[scope] for scope in _COLUMNS},
        "created_at": plan.created_at,
    }
