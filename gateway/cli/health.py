"""Health checks and metrics of the background job processes."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from typing import Any, Final, Never

from prometheus_client import REGISTRY, CollectorRegistry

from common.health import HealthServer
from gateway.platform.settings import Settings
from gateway.records.errors import StartupError

SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def serving_health(
    settings: Settings,
    is_healthy: Callable[[], bool],
    *,
    registry: CollectorRegistry = REGISTRY,
) -> Iterator[None]:
    """Serve /metrics and /healthz within a block, if the settings name a port.

    SIGTERM and SIGINT exit the process with status 0 until Celery installs its own handlers. Raises
    StartupError if another process listens on the port.
    """
    before = {number: signal.signal(number, _exit_at_once) for number in SIGNALS}
    try:
        port = settings.metrics_port
        with closing(_serve(settings, is_healthy, registry)) if port else nullcontext():
            yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


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
            f"SLUICE_METRICS_PORT: cannot listen on {settings.metrics_host}:"
            f"{settings.metrics_port} ({error.strerror})."
        ) from error


def _exit_at_once(*_: Any) -> Never:
    """Handle a signal when there is nothing to finish.

    SystemExit could be raised anywhere, even in an import, where Python replaces it with other
    errors.
    """
    os._exit(0)
