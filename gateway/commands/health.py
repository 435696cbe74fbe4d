"""How the processes of background jobs tell of themselves."""

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from typing import Any, Never

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

    SIGTERM raises SystemExit until Celery installs a handler of its own. Raises StartupError if another process
    listens on the port.
    """
    before = signal.signal(signal.SIGTERM, _exit)
    try:
        port = settings.metrics_port
        with closing(_serve(settings, is_healthy, registry)) if port else nullcontext():
            yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _serve(
    settings: Settings, is_healthy: Callable[[], bool], registry: CollectorRegistry
) -> HealthServer:
    try:
        return HealthServer(
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


def _exit(*_: Any) -> Never:
    sys.exit(0)
