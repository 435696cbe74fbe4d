"""Models, their queues and workers."""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple

from fastapi import APIRouter, Response

from contract.messages import WorkerState
from gateway.billing.ledger.history import Served
from gateway.console.formats import duration
from gateway.console.rendering import outside
from gateway.console.routing import AnyVisitor, OperatorRoute
from gateway.console.tables import Cell, Column, Table
from gateway.console.usage_query import FAILURES
from gateway.http.services import AllServices, Services
from gateway.models.catalogue import Catalogue, SeenWorker, ServedModel
from gateway.platform.settings import Settings
from gateway.records.times import to_time

LATE_MS: Final = 2500
"""First tokens that take longer are late; the objective allows 1 %."""
FAILED: Final = f"/console/requests?range=24h&outcome={FAILURES}"
"""The page of failed requests of a day."""
Workers = Mapping[str, Sequence[SeenWorker]]
"""The workers of each model."""

router = APIRouter(route_class=OperatorRoute, include_in_schema=False)


@router.get("/console/models")
async def models(visitor: AnyVisitor, services: AllServices) -> Response:
    """Show each model with its queue and its workers; htmx loads the page again and again."""
    workers = await all_workers(services)
    table = models_table(services[Settings], services[Catalogue].models, workers)
    tables = [workers_table(model, seen) for model, seen in workers.items()]
    return visitor.page("operators/models.html", table=table, workers=tables)


async def all_workers(services: Services) -> Workers:
    """Return the workers of all models, silent ones too. Raises RedisError."""
    names = [each.card.model for each in services[Catalogue].models]
    found = await asyncio.gather(*map(services[Catalogue].workers, names))
    return dict(zip(names, found, strict=True))


class Recent(NamedTuple):
    """How a model has served the current and the last hour."""

    p95_ms: int | None
    """Time to the first token."""
    served: Served


def models_table(
    settings: Settings,
    models: Sequence[ServedModel],
    workers: Workers,
    recent: Mapping[str, Recent] = MappingProxyType({}),
) -> Table:
    """Return the queue and the workers of each model, and how it has served lately."""

    def first_token(model: ServedModel) -> Cell | None:
        late_ms = recent[model.card.model].p95_ms
        if late_ms is None:
            return None
        return Cell(duration(late_ms), kind="bad" if late_ms > LATE_MS else "")

    def failed(model: ServedModel) -> Cell | None:
        served = recent[model.card.model].served
        if not served.requests:
            return None
        text = f"{100 * served.failed_requests / served.requests:.1f} %"
        return Cell(text, FAILED, "bad" if served.failed_requests else "")

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
        Column("Tenants", lambda each: each.status.waiting_tenants, "num wide"),
        Column("Oldest wait", _oldest_wait, "num wide"),
        Column("Batch jobs", lambda each: each.status.waiting_batch_jobs, "num wide"),
    ]
    if recent:
        columns[2:2] = [
            Column("First token, p95", first_token, "num"),
            Column("Failed", failed, "num"),
        ]
    if settings.model_dashboard_url:
        columns.append(Column("", dashboard))
    return Table("Models", columns, models, "No worker has announced a model.")


def workers_table(model: str, workers: Sequence[SeenWorker]) -> Table:
    """Return what the workers of a model announce, or announced last."""

    def failure(each: SeenWorker) -> Cell:
        text = each.card.inexact or each.card.last_failure
        return Cell(f"inexact: {text}" if each.card.inexact else text, kind="bad" if text else "")

    columns = (
        Column("Worker", lambda each: each.card.id, "mono"),
        Column("State", _worker_state),
        Column("Age", _age, "num"),
        Column("Engine", lambda each: each.card.engine, "wide"),
        Column("Exactness class", _exactness, "mono wide"),
        Column("Last seen (UTC)", lambda each: to_time(each.at_ms), "time wide"),
        Column("Context window", lambda each: each.card.context_window, "num wide"),
        Column("Most sequences", lambda each: each.card.max_sequences, "num wide"),
        Column("Restarts", lambda each: each.card.engine_restarts, "num wide"),
        Column("Last failure", failure, "below"),
    )
    return Table(f"Workers of {model}", columns, workers, "No worker of this model is running.")


def _worker_state(each: SeenWorker) -> Cell:
    if each.silent_ms:
        return Cell(f"silent for {duration(each.silent_ms)}", kind="bad")
    is_ready = each.card.state is WorkerState.READY
    return Cell(each.card.state, kind="good" if is_ready else "warn")


def _age(each: SeenWorker) -> str:
    return duration(each.at_ms - 1000 * each.card.created)


def _exactness(each: SeenWorker) -> str | None:
    return each.card.exactness.digest if each.card.exactness else None


def sequences(workers: Iterable[SeenWorker]) -> int:
    """Return how many sequences workers run at once, at most."""
    return sum(each.card.max_sequences for each in workers if not each.silent_ms)


def _oldest_wait(model: ServedModel) -> str | None:
    seconds = model.status.oldest_wait_seconds
    return duration(1000 * seconds) if seconds else None


def _state(model: ServedModel) -> Cell:
    if model.is_ready:
        return Cell("ready", kind="good")
    is_loading = model.card.state is WorkerState.LOADING
    return Cell("loading", kind="warn") if is_loading else Cell("no worker", kind="bad")
