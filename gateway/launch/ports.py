"""Find free TCP ports on the loopback interface."""

import socket
from collections.abc import Collection
from typing import Final

from gateway.errors import StartupError

LOOPBACK: Final = "127.0.0.1"
TRIED_PORTS: Final = 100


def require_ports(first: int, count: int, *, option: str = "--port") -> list[int]:
    """Return `count` ports from `first`. Raises StartupError if one is in use, with `option`."""
    ports = list(range(first, first + count))
    for port in ports:
        if not _is_free(port):
            raise StartupError(
                f"Port {port} is in use. Choose another one with {option}, or omit {option} to use "
                "the next free port."
            )
    return ports


def find_ports(first: int, count: int, *, apart_from: Collection[int] = ()) -> list[int]:
    """Return `count` consecutive free ports, at `first` or soon after it, none in `apart_from`."""
    for start in range(first, first + TRIED_PORTS):
        ports = list(range(start, start + count))
        if all(port not in apart_from and _is_free(port) for port in ports):
            return ports
    raise StartupError(
        f"There are no {count} consecutive free ports from {first} to {first + TRIED_PORTS}. "
        "Choose others with --port."
    )


def any_port() -> int:
    """Return a free port chosen by the system."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        port: int = probe.getsockname()[1]
        return port


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        # Without this, a port whose last connections are still closing would look occupied.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
            probe.listen(1)
        except (OSError, OverflowError):
            return False
        return True
