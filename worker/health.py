"""The port of a worker's or a host's metrics and health checks."""

from collections.abc import Callable, Mapping

from common.health import HealthServer


def open_health(
    host: str, port: int, checks: Mapping[str, Callable[[], bool]]
) -> HealthServer | None:
    """Serve /metrics and health checks on `port`; None if the port is 0.

    Raises ValueError if the port cannot be opened, for example since another process has it.
    """
    if not port:
        return None
    try:
        return HealthServer(host, port, checks)
    except OSError as error:
        raise ValueError(
            f"--health-port: cannot listen on {host}:{port} ({error.strerror})"
        ) from None
