"""Make the public status from the history in SQL and the current state of the models."""

import asyncio
from collections.abc import Sequence
from datetime import date
from typing import Any, Final

from gateway.billing.ledger.history import DAYS, RecordedService, Served, ServiceHistory
from gateway.billing.ledger.rollups import DAY
from gateway.billing.status.schemas import DayStatus, PublicModelStatus, ServiceState, ServiceStatus
from gateway.models.catalogue import Catalogue, ServedModel

LONG_WAIT_SECONDS: Final = 30.0
"""A model is degraded while a request waits for longer."""
MOST_FAILED_PERCENT: Final = 5
"""A model is degraded if more of the requests of the current and the last hour failed."""
STALE_SECONDS: Final = 10.0
"""Age of the catalogue above which the queue counts as unreachable."""


async def service_status(
    service: ServiceHistory, catalogue: Catalogue, *, days: int = DAYS
) -> ServiceStatus:
    """Return the status of this moment and of a number of days, today included.

    It is up to `FRESH_SECONDS` old.
    """
    history = await service.get()
    models, is_stale = catalogue.models, catalogue.age_seconds > STALE_SECONDS

    # In another thread: with many models it would block the event loop.
    async def make() -> ServiceStatus:
        return await asyncio.to_thread(_status, history, models, days, is_stale=is_stale)

    return await history.once(("status", days), make)


def _status(
    history: RecordedService, models: Sequence[ServedModel], days: int, *, is_stale: bool
) -> ServiceStatus:
    today = history.read_at.date()
    dates = [today - age * DAY for age in reversed(range(days))]
    states = [ServiceState.UNAVAILABLE if is_stale else _state(model, history) for model in models]
    everything = [Served.total(history.days.get(day, {}).values()) for day in dates]
    return ServiceStatus(
        state=_worst(states, is_stale=is_stale),
        updated_at=history.read_at,
        is_history_known=history.is_known,
        **_numbers(Served.total(everything)),
        days=_days(dates, everything),
        models=[
            _model_status(model.card.model, state, history, dates)
            for model, state in zip(models, states, strict=True)
        ],
    )


def _model_status(
    name: str, state: ServiceState, history: RecordedService, dates: Sequence[date]
) -> PublicModelStatus:
    served = [history.days.get(day, {}).get(name, Served()) for day in dates]
    return PublicModelStatus(
        model=name, state=state, **_numbers(Served.total(served)), days=_days(dates, served)
    )


def _days(dates: Sequence[date], served: Sequence[Served]) -> list[DayStatus]:
    return [DayStatus(date=day, **_numbers(each)) for day, each in zip(dates, served, strict=True)]


def _numbers(served: Served) -> dict[str, Any]:
    return {
        "availability": served.availability,
        "p50_ms": served.p50_ms,
        "p75_ms": served.p75_ms,
    }


def _state(model: ServedModel, history: RecordedService) -> ServiceState:
    if not (model.is_ready or model.is_asleep):
        return ServiceState.NO_WORKER
    recent = history.recent(model.card.model)
    has_failed = 100 * recent.failed_requests > MOST_FAILED_PERCENT * recent.requests
    if has_failed or model.status.oldest_wait_seconds > LONG_WAIT_SECONDS:
        return ServiceState.DEGRADED
    return ServiceState.OPERATIONAL


def _worst(states: Sequence[ServiceState], *, is_stale: bool) -> ServiceState:
    if is_stale:
        return ServiceState.UNAVAILABLE
    if all(state is ServiceState.NO_WORKER for state in states):
        return ServiceState.NO_WORKER
    if all(state is ServiceState.OPERATIONAL for state in states):
        return ServiceState.OPERATIONAL
    return ServiceState.DEGRADED
