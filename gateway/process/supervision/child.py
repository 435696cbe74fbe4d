"""A child process of a supervisor, in its own process group."""

import asyncio
import contextlib
import os
import signal
import time
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from gateway.platform.concurrency.tether import tethered
from gateway.platform.settings import child_environment

ORPHAN_SECONDS: Final = 3.0
"""How long processes that a child leaves running may take to exit by themselves."""
LOG_TAIL_LINES: Final = 15

_POLL_SECONDS = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildSpec:
    """How to start one process."""

    name: str
    """Name in messages, such as `gateway 1`."""
    command: tuple[str, ...]
    log: Path | None = None
    """File for its output; None for the output of this process."""
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Environment variables in addition to this process's own; they may contain passwords."""
    configuration: str = field(default="", repr=False)
    """Text for the process's standard input."""
    descriptors: tuple[int, ...] = ()
    """Open files of this process that it inherits, under the same numbers."""
    stop_seconds: float
    """How long it may take to exit after SIGTERM."""


class Child:
    """A running process and its descendants."""

    def __init__(self, spec: ChildSpec, process: Process) -> None:
        self.spec = spec
        self._process = process

    @classmethod
    async def start(cls, spec: ChildSpec) -> "Child":
        """Start the process. Its output is appended to its log, if it has one."""
        with nullcontext() if spec.log is None else spec.log.open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *tethered(*spec.command),
                stdin=PIPE if spec.configuration else DEVNULL,
                stdout=log,
                stderr=log,
                env=child_environment(**spec.environment),
                pass_fds=spec.descriptors,
                # Ctrl-C then reaches only this process, which stops the children in order. A
                # session for each child would also do this. But Linux divides processor time
                # between sessions, so on a small machine the gateway would wait a tenth of a second
                # next to a busy engine.
                process_group=0,
            )
        child = cls(spec, process)
        try:
            await child._feed()
        except asyncio.CancelledError:
            # No other code has a reference to the process, so no other code could stop it.
            await child.stop()
            raise
        return child

    @property
    def pid(self) -> int:
        """Id of the process and of its group."""
        return self._process.pid

    async def wait(self) -> int:
        """Wait for the process to exit and return its exit status; negative for a signal."""
        return await self._process.wait()

    async def stop(self) -> int:
        """Stop the process and its descendants: with SIGTERM, then with SIGKILL after a timeout.

        Return its exit status; negative for a signal.
        """
        self.terminate()
        try:
            async with asyncio.timeout(self.spec.stop_seconds):
                await self._process.wait()
        except TimeoutError:
            self.kill()
        await self.end_orphans()
        return await self._process.wait()

    def terminate(self) -> None:
        """Send SIGTERM to the process, without its descendants."""
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()

    def kill(self) -> None:
        """Kill the whole group immediately."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    async def end_orphans(self) -> None:
        """Stop and reap processes that the process left in its group."""
        if not await self._group_is_gone():
            self.kill()
            await self._group_is_gone()

    async def _group_is_gone(self) -> bool:
        """Wait for the members to exit; return whether they did in time."""
        deadline = time.monotonic() + ORPHAN_SECONDS
        while time.monotonic() < deadline:
            if not _reap_group(self.pid):
                return True
            await asyncio.sleep(_POLL_SECONDS)
        return False

    async def _feed(self) -> None:
        pipe = self._process.stdin
        if pipe is None:
            return
        # The process may have exited already; its waiter reports that.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            pipe.write(self.spec.configuration.encode())
            await pipe.drain()
        pipe.close()


def describe_exit(status: int) -> str:
    """Describe an exit status in words."""
    if status >= 0:
        return f"exit status {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"


def log_tail(log: Path) -> str:
    """Return the last lines of a log, indented."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return "\n".join(f"    {line}" for line in lines[-LOG_TAIL_LINES:] or ["(its log is empty)"])


def _reap_group(group: int) -> bool:
    """Reap dead members; return whether the group still has members."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-group, os.WNOHANG)[0]:
            pass
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
