"""How the processes of background jobs tell of themselves."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from prometheus_client import REGISTRY, CollectorRegistry

from contract.health import HealthServer
from gateway.errors import StartupError
from gateway.settings import Settings


@contextmanager
def answering(
    settings: Settings,
    is_healthy: Callable[[], bool],
    *,
    registry: CollectorRegistry = REGISTRY,
) -> Iterator[None]:
    """Answer /metrics and /healthz for the length of a block, if the settings name a port.

    Raises StartupError if somebody else listens there.
    """
    if not settings.metrics_port:
        yield
        return
    try:
        server = HealthServer(
            settings.metrics_host,
            settings.metrics_port,
            {"/healthz": is_healthy},
            registry=registry,
        )
    except OSError as error:
        raise StartupError(
            f"SLUICE_METRICS_PORT: nothing can listen on {settings.metrics_host}:"
            f"{settings.metrics_port} ({error.strerror})."
        ) from error
    try:
        yield
    finally:
        server.close()
