"""Supervisor that keeps processes running and stops them in order.

`sluice up` uses it, and `sluice gateway --processes`.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final

from common.tasks import Backoff, end_task
from gateway.process.supervision.child import Child, ChildSpec, describe_exit, log_tail
from gateway.records.errors import StartupError

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
    """The children, in the order in which they were started.

    Args:
        report: Shows a message to the user at the terminal.
    """

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
                self._note_death(child, status)
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

    def _note_death(self, child: Child, status: int) -> None:
        if not self._died.done():
            self._died.set_exception(ChildDiedError(child.spec, status))


async def unless(stop: asyncio.Event, work: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine to its end, or cancel it once the event is set."""
    working, stopping = asyncio.create_task(work), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
    finally:
        await end_task(working, stopping)
