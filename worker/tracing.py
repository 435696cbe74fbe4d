"""Start and stop tracing in a worker process."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from opentelemetry.trace import Tracer

from common.tracing import close_provider, open_provider, tracer_of
from worker.settings import WorkerSettings

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

SERVICE: Final = "sluice-worker"


@dataclass(slots=True)
class Tracing:
    """Tracing state; used while tracing is on."""

    provider: "TracerProvider | None" = None
    tracer: Tracer | None = None
    worker: str = ""
    model: str = ""


state: Final = Tracing()


def start(settings: WorkerSettings) -> None:
    """Start tracing if the settings enable it. Raises ValueError for a bad `OTEL_` variable."""
    if not settings.traces:
        return
    from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased

    provider = open_provider(SERVICE, instance=settings.worker_id, sampler=ParentBased(ALWAYS_OFF))
    state.provider = provider
    state.tracer = tracer_of(provider)
    state.worker, state.model = settings.worker_id, settings.served_name


def stop() -> None:
    """Stop tracing, and export pending spans within a few seconds."""
    provider = state.provider
    state.provider, state.tracer = None, None
    if provider is not None:
        close_provider(provider)
