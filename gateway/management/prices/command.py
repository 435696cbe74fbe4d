"""`sluice prices`: model prices."""

from datetime import datetime
from typing import Final

import click

from contract.tier import ServiceTier
from gateway.management.prices.service import MAX_PRICE_MICROS, PriceService
from gateway.tenancy.records import Price
from gateway.terminal.entities import prints, table
from gateway.terminal.money import Dollars, Time, show_dollars
from gateway.terminal.options import Stores, with_database, with_stores
from gateway.terminal.output import show_time

EPILOG = """\
\b
Examples:
  sluice prices add llama-8b --prompt 0.15 --cached 0.05 --completion 0.60
  sluice prices add llama-8b --tier flex --prompt 0.08 --completion 0.30
  sluice prices add llama-8b --prompt 0.12 --completion 0.50 --effective-at 2027-01-01
  sluice prices list
  sluice prices list --model llama-8b --history

Amounts are in dollars per million tokens, with at most six decimals. A model without a price is
free.
"""

_PRICE: Final = Dollars(0, MAX_PRICE_MICROS)


def _to_row(price: Price) -> tuple[str, ...]:
    amounts = (price.prompt_micros, price.cached_micros, price.completion_micros)
    return (
        price.model,
        price.service_tier,
        *map(show_dollars, amounts),
        show_time(price.effective_at),
    )


_prints = prints(table(("MODEL", "TIER", "PROMPT", "CACHED", "COMPLETION", "EFFECTIVE"), _to_row))


@click.group("prices", epilog=EPILOG)
def command() -> None:
    """Add and list model prices."""


@command.command()
@click.argument("model")
@click.option("--prompt", type=_PRICE, required=True, help="Dollars per million prompt tokens.")
@click.option(
    "--cached",
    type=_PRICE,
    help="Dollars per million cached prompt tokens.  [default: the prompt price]",
)
@click.option(
    "--completion", type=_PRICE, required=True, help="Dollars per million completion tokens."
)
@click.option(
    "--tier",
    type=click.Choice([tier.value for tier in ServiceTier]),
    default=ServiceTier.DEFAULT.value,
    show_default=True,
    help="Service tier; a tier without a price has the price of the default tier.",
)
@click.option("--effective-at", type=Time(), help="When the price takes effect.  [default: now]")
@_prints
@with_stores
async def add(
    stores: Stores,
    model: str,
    *,
    prompt: int,
    cached: int | None,
    completion: int,
    tier: str,
    effective_at: datetime | None,
) -> Price:
    """Set the price of MODEL. The history keeps older prices; earlier usage is charged by them."""
    return await _service(stores).add(
        model,
        prompt_micros=prompt,
        cached_micros=cached,
        completion_micros=completion,
        service_tier=ServiceTier(tier),
        effective_at=effective_at,
        actor=stores.actor,
    )


@command.command("list")
@click.option("--model", help="Only this model.")
@click.option("--history", is_flag=True, help="Include past and future prices.")
@_prints
@with_database
async def list_prices(stores: Stores, *, model: str | None, history: bool) -> list[Price]:
    """List the prices in force."""
    service = _service(stores)
    return await (service.list_history(model) if history else service.list_current(model))


def _service(stores: Stores) -> PriceService:
    return PriceService(stores.database, stores.announcer)
