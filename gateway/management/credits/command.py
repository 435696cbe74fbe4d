"""`sluice credits`: prepaid credit balances."""

from datetime import datetime
from typing import Any

import click

from gateway.management.credits.checks import MAX_AMOUNT_MICROS
from gateway.management.credits.service import CreditService
from gateway.tenancy.records import Credit
from gateway.terminal.entities import prints, table
from gateway.terminal.money import Dollars, Time, show_dollars
from gateway.terminal.options import Stores, with_database, with_stores
from gateway.terminal.output import show_time

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


def _to_row(credit: Credit) -> tuple[str, ...]:
    return (
        credit.id,
        credit.kind,
        show_dollars(credit.amount_micros),
        show_time(credit.created_at),
        show_time(credit.expires_at),
        credit.grant_id or "-",
        credit.note or "-",
    )


def _balance_row(balance: dict[str, Any]) -> tuple[str, ...]:
    tenant, *amounts = balance.values()
    return (tenant, *map(show_dollars, amounts))


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


_prints = prints(
    table(("ID", "KIND", "AMOUNT", "CREATED", "EXPIRES", "OF GRANT", "NOTE"), _to_row), _to_json
)


@click.group("credits", epilog=EPILOG)
def command() -> None:
    """Grant, adjust and show prepaid credits."""


# Without this, an amount such as -3.50 is parsed as an option.
@command.command(context_settings={"ignore_unknown_options": True})
@click.argument("tenant")
@click.argument("amount", type=Dollars(1, MAX_AMOUNT_MICROS))
@click.option("--note", default="", help="Purpose of the grant.")
@click.option("--expires-at", type=Time(), help="When the rest of the grant expires.")
@_prints
@with_stores
async def grant(
    stores: Stores, tenant: str, amount: int, *, note: str, expires_at: datetime | None
) -> Credit:
    """Grant AMOUNT dollars to TENANT (its id)."""
    return await _service(stores).grant(
        tenant, amount, note=note, expires_at=expires_at, actor=stores.actor
    )


@command.command(context_settings={"ignore_unknown_options": True})
@click.argument("tenant")
@click.argument("amount", type=Dollars(-MAX_AMOUNT_MICROS, MAX_AMOUNT_MICROS))
@click.option("--note", required=True, help="Why.")
@_prints
@with_stores
async def adjust(stores: Stores, tenant: str, amount: int, *, note: str) -> Credit:
    """Add AMOUNT dollars to the balance of TENANT (its id), or deduct them if negative."""
    return await _service(stores).adjust(tenant, amount, note=note, actor=stores.actor)


@command.command()
@click.argument("tenant")
@prints(table(("TENANT", "GRANTED", "SPENT", "BALANCE"), _balance_row))
@with_database
async def balance(stores: Stores, tenant: str) -> dict[str, Any]:
    """Show the balance of TENANT (its id). Usage is included a few seconds after it ends."""
    found = await _service(stores).balance(tenant)
    return {
        "tenant": tenant,
        "granted_micros": found.granted_micros,
        "spent_micros": found.spent_micros,
        "balance_micros": found.micros,
    }


@command.command("list")
@click.argument("tenant")
@_prints
@with_database
async def list_credits(stores: Stores, tenant: str) -> list[Credit]:
    """List the changes to the balance of TENANT (its id), except usage."""
    return await _service(stores).list_all(tenant)


def _service(stores: Stores) -> CreditService:
    return CreditService(stores.database, stores.announcer)
