"""`sluice credits`: prepaid credit balances."""

from datetime import datetime
from typing import Any

import click

from gateway.management.credits.service import CreditService
from gateway.tenancy.records import Credit
from gateway.terminal.money import Dollars, Time, show_dollars
from gateway.terminal.options import (
    Stores,
    database_option,
    json_option,
    open_stores,
    redis_option,
    runs_async,
)
from gateway.terminal.output import print_json, print_table, show_time

EPILOG = """\
\b
Examples:
  sluice credits grant acme 100
  sluice credits grant acme 25 --note "trial" --expires-at 2027-01-01
  sluice credits adjust acme -3.50 --note "granted twice"
  sluice credits balance acme
  sluice credits list acme

Amounts are in dollars, with at most six decimals. Credits apply to tenants with prepaid billing.
"""


@click.group("credits", epilog=EPILOG)
def command() -> None:
    """Grant, adjust and show prepaid credits."""


@command.command()
@click.argument("tenant")
@click.argument("amount", type=Dollars())
@click.option("--note", default="", help="Purpose of the grant.")
@click.option("--expires-at", type=Time(), help="When the rest of the grant expires.")
@json_option
@database_option
@redis_option
@runs_async
async def grant(
    tenant: str,
    amount: int,
    *,
    note: str,
    expires_at: datetime | None,
    as_json: bool,
    database_url: str | None,
    redis_url: str | None,
) -> None:
    """Grant AMOUNT dollars to TENANT (its id)."""
    async with open_stores(database_url, redis_url) as stores:
        granted = await _service(stores).grant(
            tenant, amount, note=note, expires_at=expires_at, actor=stores.actor
        )
    _print(granted, as_json=as_json)


# Without this, an amount such as -3.50 is parsed as an option.
@command.command(context_settings={"ignore_unknown_options": True})
@click.argument("tenant")
@click.argument("amount", type=Dollars())
@click.option("--note", required=True, help="Why.")
@json_option
@database_option
@redis_option
@runs_async
async def adjust(
    tenant: str,
    amount: int,
    *,
    note: str,
    as_json: bool,
    database_url: str | None,
    redis_url: str | None,
) -> None:
    """Add AMOUNT dollars to the balance of TENANT (its id), or deduct them if negative."""
    async with open_stores(database_url, redis_url) as stores:
        adjusted = await _service(stores).adjust(tenant, amount, note=note, actor=stores.actor)
    _print(adjusted, as_json=as_json)


@command.command()
@click.argument("tenant")
@json_option
@database_option
@runs_async
async def balance(tenant: str, *, as_json: bool, database_url: str | None) -> None:
    """Show the balance of TENANT (its id). Usage is included a few seconds after it ends."""
    async with open_stores(database_url, None) as stores:
        found = await _service(stores).balance(tenant)
    if as_json:
        print_json(
            {
                "tenant": tenant,
                "granted_micros": found.granted_micros,
                "spent_micros": found.spent_micros,
                "balance_micros": found.micros,
            }
        )
        return
    amounts = (found.granted_micros, found.spent_micros, found.micros)
    print_table(("TENANT", "GRANTED", "SPENT", "BALANCE"), [(tenant, *map(show_dollars, amounts))])


@command.command("list")
@click.argument("tenant")
@json_option
@database_option
@runs_async
async def list_credits(tenant: str, *, as_json: bool, database_url: str | None) -> None:
    """List the changes to the balance of TENANT (its id), except usage."""
    async with open_stores(database_url, None) as stores:
        found = await _service(stores).list_all(tenant)
    if as_json:
        print_json([_to_json(credit) for credit in found])
    else:
        _print_table(found)


def _service(stores: Stores) -> CreditService:
    return CreditService(stores.database, stores.announcer)


def _print(credit: Credit, *, as_json: bool) -> None:
    if as_json:
        print_json(_to_json(credit))
    else:
        _print_table([credit])


def _print_table(found: list[Credit]) -> None:
    print_table(
        ("ID", "KIND", "AMOUNT", "CREATED", "EXPIRES", "OF GRANT", "NOTE"),
        [
            (
                credit.id,
                credit.kind,
                show_dollars(credit.amount_micros),
                show_time(credit.created_at),
                show_time(credit.expires_at),
                credit.grant_id or "-",
                credit.note or "-",
            )
            for credit in found
        ],
    )


def _to_json(credit: Credit) -> dict[str, Any]:
    return {
        "id": credit.id,
        "tenant": credit.tenant_id,
        "kind": credit.kind,
        "amount_micros": credit.amount_micros,
        "note": credit.note,
        "created_at": credit.created_at,
        "expires_at": credit.expires_at,
        "grant_id": credit.grant_id,
    }
