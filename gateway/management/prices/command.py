"""`sluice prices`: model prices."""

from datetime import datetime
from typing import Any

import click

from contract.tier import ServiceTier
from gateway.management.prices.service import PriceService
from gateway.tenancy.records import Price
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
  sluice prices add llama-8b --prompt 0.15 --cached 0.05 --completion 0.60
  sluice prices add llama-8b --tier flex --prompt 0.08 --completion 0.30
  sluice prices add llama-8b --prompt 0.12 --completion 0.50 --effective-at 2027-01-01
  sluice prices list
  sluice prices list --model llama-8b --history

Amounts are in dollars per million tokens, with at most six decimals. A model without a price is
free.
"""


@click.group("prices", epilog=EPILOG)
def command() -> None:
    """Add and list model prices."""


@command.command()
@click.argument("model")
@click.option("--prompt", type=Dollars(), required=True, help="Dollars per million prompt tokens.")
@click.option(
    "--cached",
    type=Dollars(),
    help="Dollars per million cached prompt tokens.  [default: the prompt price]",
)
@click.option(
    "--completion", type=Dollars(), required=True, help="Dollars per million completion tokens."
)
@click.option(
    "--tier",
    type=click.Choice([tier.value for tier in ServiceTier]),
    default=ServiceTier.DEFAULT.value,
    show_default=True,
    help="Service tier; a tier without a price has the price of the default tier.",
)
@click.option("--effective-at", type=Time(), help="When the price takes effect.  [default: now]")
@json_option
@database_option
@redis_option
@runs_async
async def add(
    model: str,
    *,
    prompt: int,
    cached: int | None,
    completion: int,
    tier: str,
    effective_at: datetime | None,
    as_json: bool,
    database_url: str | None,
    redis_url: str | None,
) -> None:
    """Set the price of MODEL. The history keeps older prices; earlier usage is charged by them."""
    async with open_stores(database_url, redis_url) as stores:
        price = await _service(stores).add(
            model,
            prompt_micros=prompt,
            cached_micros=cached,
            completion_micros=completion,
            service_tier=ServiceTier(tier),
            effective_at=effective_at,
            actor=stores.actor,
        )
    if as_json:
        print_json(_to_json(price))
    else:
        _print_table([price])


@command.command("list")
@click.option("--model", help="Only this model.")
@click.option("--history", is_flag=True, help="Include past and future prices.")
@json_option
@database_option
@runs_async
async def list_prices(
    *, model: str | None, history: bool, as_json: bool, database_url: str | None
) -> None:
    """List the prices in force."""
    async with open_stores(database_url, None) as stores:
        service = _service(stores)
        prices = await (service.list_history(model) if history else service.list_current(model))
    if as_json:
        print_json([_to_json(price) for price in prices])
    else:
        _print_table(prices)


def _service(stores: Stores) -> PriceService:
    return PriceService(stores.database, stores.announcer)


def _print_table(prices: list[Price]) -> None:
    print_table(
        ("MODEL", "TIER", "PROMPT", "CACHED", "COMPLETION", "EFFECTIVE"),
        [
            (
                price.model,
                price.service_tier,
                show_dollars(price.prompt_micros),
                show_dollars(price.cached_micros),
                show_dollars(price.completion_micros),
                show_time(price.effective_at),
            )
            for price in prices
        ],
    )


def _to_json(price: Price) -> dict[str, Any]:
    return {
        "id": price.id,
        "model": price.model,
        "service_tier": price.service_tier,
        "prompt_micros": price.prompt_micros,
        "cached_micros": price.cached_micros,
        "completion_micros": price.completion_micros,
        "effective_at": price.effective_at,
        "created_at": price.created_at,
    }
