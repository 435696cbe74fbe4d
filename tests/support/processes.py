"""Child processes of tests: free ports, waiting, and termination without leftovers."""

import os
import secrets
import socket
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from gateway.platform.concurrency.parent_death import tethered
from tests.support.patience import PATIENCE_SECONDS, PROCESS_PATIENCE_SECONDS
from tests.support.preloaded import Preloaded, role_of

SERVER_PORTS = range(12_000, 32_000)
"""Below the kernel's ports for outgoing connections, which could take a free one."""


_LASTING_THREAD = ThreadPoolExecutor(1)
"""Linux: the parent of a process is a thread, and threads of an event loop end with it."""


_preloaded = cache(Preloaded)
"""The connection to the fork server of a role."""


def spawn(*command: str, **options: Any) -> "subprocess.Popen[bytes]":
    """Start a program that ends with this process, even if this process is killed.

    `options` are Popen's.
    """
    tether_command = tethered(*command)

    def start() -> "subprocess.Popen[bytes]":
        role = role_of([*command], options.get("env", os.environ))
        fork = _preloaded(role).start([*command], options) if role else None
        return fork or subprocess.Popen(tether_command, **options)

    return _LASTING_THREAD.submit(start).result()


def free_port(ports: range = SERVER_PORTS, *, count: int = 1) -> int:
    """Return the first of `count` TCP ports of loopback, reserved for servers of this process.

    Such a server can restart: no other process of the tests receives the port meanwhile.
    """
    while True:
        first = secrets.choice(ports)
        if all(reserve(port) for port in range(first, first + count)):
            return first


def reserve(port: int) -> bool:
    """Reserve a free TCP port of loopback until this process ends. Return False if it is taken."""
    reservation = socket.socket()
    try:
        reservation.bind(("127.0.0.1", port))
    except OSError:
        reservation.close()
        return False
    # Servers set this option before they bind, so they may use the port. A second reservation sets
    # it afterwards, and fails.
    reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reservation.detach()
    return True


def is_free(port: int) -> bool:
    """Return whether a server could listen on a TCP port of loopback."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def wait_until(
    condition: Callable[[], bool],
    *,
    what: str,
    seconds: float = PROCESS_PATIENCE_SECONDS,
    longest_pause: float = 0.2,
) -> None:
    """Poll `condition` until it holds, with pauses that grow to `longest_pause` seconds.

    Raise TimeoutError after `seconds`, with `what` did not happen.
    """
    deadline = time.monotonic() + seconds
    pause = 0.01
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} did not happen within {seconds} s")
        time.sleep(pause)
        # The interval grows with the wait: each poll takes CPU time of several processes.
        pause = min(pause * 1.2, longest_pause)


def stop(process: subprocess.Popen[bytes], *, seconds: float = PATIENCE_SECONDS) -> int:
    """End a process: SIGTERM, then SIGKILL if it does not exit. Return its exit code."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
    return process.wait(PATIENCE_SECONDS)


def children(pid: int) -> set[int]:
    """Return the ids of the children of a process's threads; none if it has ended."""
    found: set[int] = set()
    for thread in Path("/proc").glob(f"{pid}/task/*/children"):
        # A thread may end between being listed and being read.
        with suppress(FileNotFoundError, ProcessLookupError):
            found.update(int(child) for child in thread.read_text().split())
    return found


def descendants(pid: int) -> set[int]:
    """Return the ids of a process's children, their children, and so on."""
    found = children(pid)
    return found.union(*map(descendants, found))


def is_alive(pid: int) -> bool:
    """Return whether a process runs; one that has ended and was not waited for does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    # A process that ends while its file is open has no such process.
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rsplit(")", 1)[1].split()[0] != "Z"


def resident_pages(pid: int) -> int:
    """Return the number of memory pages of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1])
