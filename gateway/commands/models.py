"""`sluice models`: list known models and remove unserved ones."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import click

from gateway.dispatch.catalogue import Catalogue, ServedModel
from gateway.redis_client import MeasuredConnection, connect, converting_errors
from gateway.terminal.options import command_settings, json_option, runs_async
from gateway.terminal.output import print_json, print_table

EPILOG = """\
\b
Examples:
  sluice models list
  sluice models remove llama-3.1-8b
"""

redis_option = click.option(
    "--redis-url", metavar="URL", help="Redis server of the workers.  [SLUICE_REDIS_URL]"
)


@click.group("models", epilog=EPILOG)
def command() -> None:
    """List models, and remove those that are no longer served.

    A model is known from its first announcement by a worker. While no worker serves it, requests
    for it receive a retryable error.
    """


@command.command("list")
@json_option
@redis_option
@runs_async
async def list_models(*, as_json: bool, redis_url: str | None) -> None:
    """Show every known model, its workers and its load."""
    async with _catalogue(redis_url) as catalogue:
        models = catalogue.models
    if as_json:
        print_json([_to_json(model) for model in models])
    else:
        headings = ("MODEL", "ALIASES", "STATE", "WORKERS", "WAITING", "RUNNING")
        print_table(headings, [_to_row(model) for model in models])


@command.command()
@click.argument("model")
@redis_option
@runs_async
async def remove(*, model: str, redis_url: str | None) -> None:
    """Remove a model that no worker serves any more: requests for it get 404 instead of 503.

    It becomes known again as soon as a worker announces it.
    """
    async with _catalogue(redis_url) as catalogue:
        known = catalogue.known(model)
        if known is None or known.card.model != model:
            raise click.ClickException(f"There is no model {model!r}.")
        status = known.status
        waiting = status.waiting_jobs + status.waiting_batch_jobs
        if status.ready_workers or waiting or status.leased_jobs:
            raise click.ClickException(
                f"{model!r} is in use: {status.ready_workers} workers serve it, "
                f"{waiting} jobs wait and {status.leased_jobs} run. "
                "Stop its workers first."
            )
        await catalogue.remove(model)
    click.echo(f"Removed {model!r}. Gateways apply this within a second.")


@asynccontextmanager
async def _catalogue(redis_url: str | None) -> AsyncIterator[Catalogue]:
    """Open the catalogue of models that workers have announced. Raises StoreUnavailableError."""
    settings = command_settings(redis_url=redis_url)
    redis = connect(settings.redis_url, max_connections=1)
    try:
        with converting_errors(redis):
            catalogue = Catalogue(MeasuredConnection(redis))
            await catalogue.refresh()
            yield catalogue
    finally:
        await redis.aclose()


def _to_row(model: ServedModel) -> list[str]:
    status = model.status
    numbers = (status.ready_workers, status.waiting_jobs, status.leased_jobs)
    aliases = " ".join(model.card.aliases) or "-"
    return [model.card.model, aliases, model.state, *map(str, numbers)]


def _to_json(model: ServedModel) -> dict[str, Any]:
    return {
        "model": model.card.model,
        "aliases": list(model.card.aliases),
        "state": model.state,
        "loading_seconds": model.card.load_seconds or None,
        "ready_workers": model.status.ready_workers,
        "waiting_jobs": model.status.waiting_jobs,
        "leased_jobs": model.status.leased_jobs,
    }
