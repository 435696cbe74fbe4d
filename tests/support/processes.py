"""Child processes of tests: free ports, waiting, and an end that leaves nothing behind."""

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

from gateway.concurrency.tether import tethered
from tests.support.patience import PATIENCE_SECONDS, PROCESS_PATIENCE_SECONDS
from tests.support.preloaded import Preloaded, role_of

SERVER_PORTS = range(12_000, 32_000)
"""Below those that the kernel gives to outgoing connections: one of these could be gone before the server starts."""


_LASTING_THREAD = ThreadPoolExecutor(1)
"""To Linux the parent of a process is the thread that started it, and those of an event loop end with it."""


_preloaded = cache(Preloaded)
"""The connection to the server of forks of a role."""


def spawn(*command: str, **options: Any) -> "subprocess.Popen[bytes]":
    """Start a program that ends with this process, even if this process is killed. `options` are Popen's."""
    tether_command = tethered(*command)

    def start() -> "subprocess.Popen[bytes]":
        role = role_of([*command], options.get("env", os.environ))
        fork = _preloaded(role).start([*command], options) if role else None
        return fork or subprocess.Popen(tether_command, **options)

    return _LASTING_THREAD.submit(start).result()


def free_port(ports: range = SERVER_PORTS) -> int:
    """Return a TCP port on loopback that nobody listens on."""
    while not is_free(port := secrets.choice(ports)):
        pass
    return port


def is_free(port: int) -> bool:
    """Tell whether a server could listen on a TCP port of loopback."""
    with socket.socket() as listener:
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
    """Poll `condition` until it holds, after pauses that grow to `longest_pause` seconds.

    Raise TimeoutError, which reports that `what` did not happen, after `seconds`.
    """
    deadline = time.monotonic() + seconds
    pause = 0.01
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} did not happen within {seconds} s")
        time.sleep(pause)
        # What takes seconds is asked for less often: each question takes processor time of several processes.
        pause = min(pause * 1.2, longest_pause)


def stop(process: subprocess.Popen[bytes], *, seconds: float = PATIENCE_SECONDS) -> int:
    """End a process: SIGTERM, then SIGKILL when it does not go. Return its exit code."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
    return process.wait(PATIENCE_SECONDS)


def children(pid: int) -> set[int]:
    """Return the ids of the processes that a process's threads have started; none if it is gone."""
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
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rsplit(")", 1)[1].split()[0] != "Z"


def resident_pages(pid: int) -> int:
    """Return how many pages of memory a process has."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1])
