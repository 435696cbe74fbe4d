"""The processes of one engine, so that none of them outlives it.

An engine's processes end with their parent by rules of their own: a hung one keeps none of them, and
one whose parent was killed belongs to nobody who would end it.
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
    """What this process has started since this object was made, through `multiprocessing`."""

    def __init__(self) -> None:
        self._others = {child.pid for child in multiprocessing.active_children()}
        self._children: set[int] = set()
        self._started: dict[int, str] = {}

    def look(self) -> None:
        """Take note of the processes that there are now, which may lose their parents later."""
        for child in multiprocessing.active_children():
            if child.pid is not None and child.pid not in self._others:
                self._children.add(child.pid)
                self._note(child.pid)

    def kill(self) -> None:
        """Kill those that are left and wait, a few seconds at most, until they are gone."""
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
            # In a container this process may be the first one, which inherits orphans, dead ones too.
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)

    def _note(self, pid: int) -> None:
        started_at = _started_at(pid)
        if started_at and self._started.setdefault(pid, started_at) == started_at:
            for child in _children(pid):
                self._note(child)

    def _alive(self) -> list[int]:
        multiprocessing.active_children()  # Takes the exit codes of those that have ended.
        return [pid for pid, since in self._started.items() if _started_at(pid) == since]


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for thread in Path("/proc").glob(f"{pid}/task/*/children"):
        # A thread may end between being listed and being read.
        with suppress(OSError):
            found += map(int, thread.read_text().split())
    return found


def _started_at(pid: int) -> str:
    """Return when a process began, which tells it from a later one of the same id; empty if it has ended."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return ""
    return "" if state in "ZX" else fields[18]
