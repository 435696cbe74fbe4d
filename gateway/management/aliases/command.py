"""`sluice aliases`: public names that split their requests over models."""

from datetime import datetime

import click

from gateway.dispatch.catalogue import Catalogue
from gateway.errors import shown
from gateway.management.aliases.schemas import AliasBody
from gateway.management.aliases.service import AliasService, read_weights
from gateway.redis_client import MeasuredConnection, converting_errors
from gateway.tenancy.aliases import Alias, Sticky
from gateway.terminal.entities import prints, table
from gateway.terminal.money import Time
from gateway.terminal.options import Stores, with_database, with_stores
from gateway.terminal.output import show_time

EPILOG = """\
\b
Examples:
  sluice aliases set chat llama-8b=95 llama-8b-v2=5
  sluice aliases set chat llama-8b=50 llama-8b-v2=50 --sticky user --fallback llama-8b
  sluice aliases set chat-2025 llama-8b --sunset 2027-01-01 --replacement chat
  sluice aliases list
  sluice aliases remove chat
"""


def _to_row(alias: Alias) -> tuple[str, ...]:
    weights = " ".join(f"{model}={weight}" for model, weight in alias.weights.items())
    sunset = "-" if alias.sunset_at is None else show_time(alias.sunset_at)
    return (alias.name, weights, alias.sticky, alias.fallback or "-", sunset)


_prints = prints(table(("ALIAS", "MODELS", "STICKY", "FALLBACK", "SUNSET"), _to_row), AliasBody.of)


@click.group("aliases", epilog=EPILOG)
def command() -> None:
    """Define, list and remove aliases: names that split their requests over models."""


@command.command("set")
@click.argument("alias")
@click.argument("models", nargs=-1, required=True, metavar="MODEL[=WEIGHT]...")
@click.option(
    "--sticky",
    type=click.Choice([sticky.value for sticky in Sticky]),
    default=Sticky.TENANT.value,
    show_default=True,
    help="Whose requests go to the same model: a tenant's, or those of each `user` of a tenant.",
)
@click.option("--fallback", help="Model of requests whose own model has no worker.")
@click.option("--sunset", type=Time(), help="When requests for ALIAS begin to fail.")
@click.option(
    "--replacement",
    help="What the error after the sunset names.  [default: the model with the largest weight]",
)
@_prints
@with_stores
async def set_alias(
    stores: Stores,
    alias: str,
    models: tuple[str, ...],
    *,
    sticky: str,
    fallback: str | None,
    sunset: datetime | None,
    replacement: str | None,
) -> Alias:
    """Define ALIAS, or replace it, on every gateway within a second.

    Callers are divided over the models by weight, by default 1.
    """
    made = await _service(stores).put(
        alias,
        weights=read_weights(models),
        sticky=Sticky(sticky),
        fallback=fallback,
        sunset_at=sunset,
        replacement=replacement,
        actor=stores.actor,
    )
    catalogue = Catalogue(MeasuredConnection(stores.redis))
    with converting_errors(stores.redis):
        await catalogue.refresh()
    if unknown := [model for model in made.models if catalogue.known(model) is None]:
        click.echo(
            f"Warning: No worker has announced {', '.join(map(shown, unknown))}. "
            "Until one does, requests for that model get 404.",
            err=True,
        )
    return made


@command.command("list")
@_prints
@with_database
async def list_aliases(stores: Stores) -> list[Alias]:
    """List all aliases."""
    return await _service(stores).list_all()


@command.command()
@click.argument("alias")
@with_stores
async def remove(stores: Stores, alias: str) -> None:
    """Remove ALIAS: requests for it get 404."""
    await _service(stores).remove(alias, actor=stores.actor)
    click.echo(f"Removed {alias!r}. Gateways apply this within a second.")


def _service(stores: Stores) -> AliasService:
    return AliasService(stores.database, stores.announcer)
