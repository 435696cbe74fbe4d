"""Supervisor that keeps processes running and stops them in order.

`sluice up` uses it, and `sluice gateway --processes`.
"""

import asyncio
import contextlib
import os
import signal
import time
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from common.tasks import Backoff, end_task
from gateway.platform.concurrency.parent_death import tethered
from gateway.platform.settings import child_environment
from gateway.records.errors import StartupError

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


@dataclass(eq=False)
class Child:
    """A running process and its descendants."""

    spec: ChildSpec
    _process: Process

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


FIRST_RESTART_SECONDS: Final = 1.0
LAST_RESTART_SECONDS: Final = 30.0
STEADY_SECONDS: Final = 60.0
"""A process that ran this long is restarted after only the initial pause."""


class ChildDiedError(StartupError):
    """A process exited during startup."""

    def __init__(self, spec: ChildSpec, status: int) -> None:
        message = f"The {spec.name} did not start ({describe_exit(status)})."
        if spec.log is not None:
            message += f" The end of its log, {spec.log}:\n{log_tail(spec.log)}"
        super().__init__(message)


class Supervisor:
    """The children, in the order in which they were started."""

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report
        self._children: list[list[Child]] = []
        self._watchers: list[asyncio.Task[None]] = []
        self._died: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._is_settled = False

    async def start(self, specs: Sequence[ChildSpec]) -> None:
        """Start processes that stop together, before those started earlier."""
        group: list[Child] = []
        self._children.append(group)
        for spec in specs:
            group.append(await Child.start(spec))
            self._watchers.append(asyncio.create_task(self._watch(group, len(group) - 1)))

    async def while_alive(self, waiting: asyncio.Task[Any]) -> None:
        """Wait for a task, or raise ChildDiedError as soon as a process exits."""
        try:
            await asyncio.wait({waiting, self._died}, return_when=asyncio.FIRST_COMPLETED)
            if self._died.done():
                self._died.result()
            waiting.result()
        finally:
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)

    def settle(self) -> None:
        """Restart processes that exit from now on; startup is complete."""
        self._is_settled = True

    async def stop(self) -> list[int]:
        """Stop all processes, the last started first. Return their exit statuses."""
        await end_task(*self._watchers)
        statuses: list[int] = []
        for group in reversed(self._children):
            statuses += await asyncio.gather(*(child.stop() for child in group))
        if self._died.done():
            self._died.exception()
        return statuses

    def terminate(self) -> None:
        """Send SIGTERM to all processes once more; `stop` continues to wait for them."""
        for group in self._children:
            for child in group:
                child.terminate()

    def kill(self) -> None:
        """Kill all processes immediately; `stop` then returns soon."""
        for group in self._children:
            for child in group:
                child.kill()

    async def _watch(self, group: list[Child], place: int) -> None:
        backoff = Backoff(FIRST_RESTART_SECONDS, LAST_RESTART_SECONDS)
        while True:
            child, started_at = group[place], time.monotonic()
            status = await child.wait()
            if not self._is_settled:
                if not self._died.done():
                    self._died.set_exception(ChildDiedError(child.spec, status))
                return
            if time.monotonic() - started_at >= STEADY_SECONDS:
                backoff.reset()
            pause = backoff.next_seconds()
            where = "" if child.spec.log is None else f" Log: {child.spec.log}"
            self._report(
                f"The {child.spec.name} exited ({describe_exit(status)}); "
                f"restarting it in {pause:g} s.{where}"
            )
            await child.end_orphans()
            await asyncio.sleep(pause)
            group[place] = await Child.start(child.spec)
