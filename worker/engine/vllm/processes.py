"""Tracks the processes of one engine, so that none of them outlives it.

An engine's processes have rules of their own to end with their parent. A hung process ignores these
rules, and nothing ends a process whose parent was killed.
"""

import multiprocessing
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

_GONE_SECONDS = 5.0
_LOOK_SECONDS = 0.02


class EngineProcesses:
    """Processes started with `multiprocessing` in this process since this object was created."""

    def __init__(self) -> None:
        self._others = {child.pid for child in multiprocessing.active_children()}
        self._children: set[int] = set()
        self._started: dict[int, str] = {}

    def look(self) -> None:
        """Record the current processes, which may lose their parents later."""
        for child in multiprocessing.active_children():
            if child.pid is not None and child.pid not in self._others:
                self._children.add(child.pid)
                self._note(child.pid)

    def kill(self) -> None:
        """Kill the remaining processes, and wait up to a few seconds until they have exited."""
        self.look()
        for pid in list(self._started):
            self._note(pid)
        until = time.monotonic() + _GONE_SECONDS
        while (alive := self._alive()) and time.monotonic() < until:
            for pid in alive:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(_LOOK_SECONDS)
        for pid in self._started.keys() - self._children:
            # In a container this process may be PID 1, which inherits orphans, including dead ones.
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)

    def _note(self, pid: int) -> None:
        started_at = _started_at(pid)
        if started_at and self._started.setdefault(pid, started_at) == started_at:
            for child in _children(pid):
                self._note(child)

    def _alive(self) -> list[int]:
        multiprocessing.active_children()  # Reaps exited children.
        return [pid for pid, since in self._started.items() if _started_at(pid) == since]


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for thread in Path("/proc").glob(f"{pid}/task/*/children"):
        # A thread may end between listing and reading.
        with suppress(OSError):
            found += map(int, thread.read_text().split())
    return found


def _started_at(pid: int) -> str:
    """Return a process's start time, to detect reuse of its id; empty if it has exited."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return ""
    return "" if state in "ZX" else fields[18]
