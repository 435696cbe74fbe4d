"""Find free TCP ports on the loopback interface, and hold them against other `sluice up`.

Their programs listen later, on sockets of their own. So this process holds the UDP port
with the number of each TCP port: another `sluice up` then takes the TCP port as occupied.
"""

import socket
from contextlib import ExitStack
from typing import Final

from gateway.records.errors import StartupError

LOOPBACK: Final = "127.0.0.1"
TRIED_PORTS: Final = 100


def require_ports(first: int, count: int, *, held: ExitStack, option: str = "--port") -> list[int]:
    """Return `count` ports from `first`, which `held` releases.

    Raises StartupError if one is in use, with `option`.
    """
    ports = list(range(first, first + count))
    for port in ports:
        if not _hold(port, held):
            raise StartupError(
                f"Port {port} is in use. Choose another one with {option}, or omit {option} to use "
                "the next free port."
            )
    return ports


def find_ports(first: int, count: int, *, held: ExitStack) -> list[int]:
    """Return `count` consecutive free ports, at `first` or soon after it, which `held` releases.

    Raises StartupError if there are none.
    """
    for start in range(first, first + TRIED_PORTS):
        ports = list(range(start, start + count))
        with ExitStack() as group:
            if all(_hold(port, group) for port in ports):
                held.push(group.pop_all())
                return ports
    raise StartupError(
        f"There are no {count} consecutive free ports from {first} to {first + TRIED_PORTS}. "
        "Choose others with --port."
    )


def any_port(*, held: ExitStack) -> int:
    """Return a free port chosen by the system, which `held` releases."""
    while True:
        with socket.socket() as probe:
            probe.bind((LOOPBACK, 0))
            port: int = probe.getsockname()[1]
        if _hold(port, held):
            return port


def _hold(port: int, held: ExitStack) -> bool:
    """Hold a port if it is free, and return whether it is."""
    claim = held.enter_context(socket.socket(type=socket.SOCK_DGRAM))
    with socket.socket() as probe:
        # Without this, a port whose last connections are still closing would look occupied.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            claim.bind((LOOPBACK, port))
            probe.bind((LOOPBACK, port))
            probe.listen(1)
        except (OSError, OverflowError):
            return False
        return True
