"""Models, their queues and workers."""

import asyncio
from collections.abc import Iterable, Mapping, Sequence

from fastapi import APIRouter, Response

from contract.messages import WorkerCard, WorkerState
from gateway.console.formats import duration
from gateway.console.rendering import outside
from gateway.console.routing import AnyVisitor, OperatorRoute
from gateway.console.tables import Cell, Column, Table
from gateway.http.services import AllServices, Services
from gateway.models.catalogue import Catalogue, ServedModel
from gateway.platform.settings import Settings

Workers = Mapping[str, Sequence[WorkerCard]]
"""The workers of each model."""

router = APIRouter(route_class=OperatorRoute, include_in_schema=False)


@router.get("/console/models")
async def models(visitor: AnyVisitor, services: AllServices) -> Response:
    """Show each model with its queue and its workers; htmx loads the page again and again."""
    workers = await all_workers(services)
    table = models_table(services[Settings], services[Catalogue].models, workers)
    return visitor.page("operators/models.html", table=table, workers=workers)


async def all_workers(services: Services) -> Workers:
    """Return what the workers of all models announce now. Raises RedisError."""
    names = [each.card.model for each in services[Catalogue].models]
    found = await asyncio.gather(*map(services[Catalogue].workers, names))
    return dict(zip(names, found, strict=True))


def models_table(settings: Settings, models: Sequence[ServedModel], workers: Workers) -> Table:
    """Return the queue and the workers of each model."""

    def running(model: ServedModel) -> str:
        return f"{model.status.leased_jobs:,} of {sequences(workers[model.card.model]):,}"

    def dashboard(model: ServedModel) -> Cell | None:
        name = model.card.model
        link = outside(settings, "model_dashboard_url", name)
        return Cell("Dashboard", link, label=f"Dashboard of {name}") if link else None

    columns = [
        Column("Model", lambda each: ", ".join([each.card.model, *each.card.aliases]), "name"),
        Column("State", _state),
        Column("Workers", lambda each: each.status.ready_workers, "num wide"),
        Column("Running", running, "num wide"),
        Column("Waiting", lambda each: each.status.waiting_jobs, "num"),
        Column("Tenants waiting", lambda each: each.status.waiting_tenants, "num wide"),
        Column("Oldest wait", _oldest_wait, "num wide"),
        Column("Batch jobs waiting", lambda each: each.status.waiting_batch_jobs, "num wide"),
    ]
    if settings.model_dashboard_url:
        columns.append(Column("", dashboard))
    return Table("Models", columns, models, "No worker has announced a model.")


def sequences(cards: Iterable[WorkerCard]) -> int:
    """Return how many sequences workers run at once, at most."""
    return sum(each.max_sequences for each in cards)


def _oldest_wait(model: ServedModel) -> str | None:
    seconds = model.status.oldest_wait_seconds
    return duration(1000 * seconds) if seconds else None


def _state(model: ServedModel) -> Cell:
    if model.is_ready:
        return Cell("ready", kind="good")
    is_loading = model.card.state is WorkerState.LOADING
    return Cell("loading", kind="warn") if is_loading else Cell("no worker", kind="bad")
