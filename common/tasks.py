"""Start and cancel asyncio tasks reliably, and compute the pauses between retries."""

import asyncio
import logging
import os
import signal
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from random import SystemRandom
from typing import Any, Final, TypeVar

from redis.exceptions import RedisError

T = TypeVar("T")

_CANCEL_AGAIN_SECONDS: Final = 0.2
END_SECONDS: Final = 2.0
"""How long `kill` waits."""

logger = logging.getLogger(__name__)

_random: Final = SystemRandom()


class TaskSet:
    """Tasks that run to their end, even if the task that started them is cancelled."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, object]) -> None:
        """Run a coroutine as a task. A failure is logged."""
        _ = self.task(work)

    def task(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run a coroutine as a task, and return it. A failure is logged."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    async def finish(self, timeout_seconds: float) -> None:
        """Wait for all tasks, and for those that they start, at most `timeout_seconds`."""
        deadline = time.monotonic() + timeout_seconds
        while self._tasks and (left := deadline - time.monotonic()) > 0:
            await asyncio.wait(self._tasks, timeout=left)

    async def cancel(self) -> None:
        """Cancel all tasks and wait until they have ended."""
        await end_task(*self._tasks)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a background task failed", exc_info=error)


_background: Final = TaskSet()


def in_background(work: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine to its end in the background."""
    _background.start(work)


async def each_apart(
    work: Callable[[T], Awaitable[object]], items: Iterable[T], *, at_once: int
) -> None:
    """Run `work` for each item, `at_once` at a time. One that fails stops no other.

    Raises the first error when all have ended.
    """
    turns = asyncio.Semaphore(at_once)

    async def run(item: T) -> None:
        async with turns:
            await work(item)

    outcomes = await asyncio.gather(*map(run, items), return_exceptions=True)
    for error in filter(None, outcomes):
        raise error


async def end_task(*tasks: asyncio.Future[Any]) -> None:
    """Cancel tasks and wait until they have ended, whatever their outcome.

    One cancellation may not suffice: up to Python 3.11, asyncio.wait_for, which the Redis client
    uses to send, can swallow it.
    """
    pending = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        done, pending = await asyncio.wait(pending, timeout=_CANCEL_AGAIN_SECONDS)
        for task in done:
            if not task.cancelled():
                # Retrieve the exception, or asyncio logs it.
                task.exception()


async def unless(stop: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """Run a coroutine to its end and return its result; cancel it once the event is set.

    Return None then.
    """
    working, stopping = asyncio.create_task(work), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
        return None if stop.is_set() else working.result()
    finally:
        await end_task(working, stopping)


async def wait_for_end(task: "asyncio.Task[Any]", *, timeout_seconds: float) -> None:
    """Wait until a task ends or the time is over.

    Like `asyncio.wait` for one task, with a third of the calls. The task continues if the time is
    over, or if the caller is cancelled.
    """
    loop = asyncio.get_running_loop()
    waiter: asyncio.Future[None] = loop.create_future()

    def wake(_: object = None) -> None:
        if not waiter.done():
            waiter.set_result(None)

    timer = loop.call_later(timeout_seconds, wake)
    task.add_done_callback(wake)
    try:
        await waiter
    finally:
        timer.cancel()
        task.remove_done_callback(wake)


def raise_if_cancelled() -> None:
    """Raise CancelledError if this task was cancelled, even if the cancellation was swallowed.

    redis-py (8.1) sends with `asyncio.wait_for`, which in Python 3.11 swallows a cancellation that
    arrives just when the send completes. A loop without this check would keep running, and the
    process would never exit.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


@contextmanager
def tolerating_outage(what: str) -> Iterator[None]:
    """Log a RedisError of the block, and continue after it.

    `what` names the block in the log, such as "refresh the catalogue".
    """
    try:
        yield
    except RedisError as error:
        logger.warning("cannot %s: %s", what, type(error).__name__)


async def repeat(what: str, step: Callable[[], Awaitable[None]], *, seconds: float) -> None:
    """Run a step, and again `seconds` after each end, until cancelled.

    A RedisError is logged; `what` names the step in the log.
    """
    while True:
        with tolerating_outage(what):
            await step()
        raise_if_cancelled()
        await asyncio.sleep(seconds)


@dataclass(slots=True)
class Backoff:
    """Pauses between retries, which double from the first to the longest until a reset."""

    first_seconds: float
    longest_seconds: float
    last_seconds: float = 0.0
    """The last pause; 0 after a reset."""

    def next_seconds(self) -> float:
        """Return the next pause."""
        doubled = max(2 * self.last_seconds, self.first_seconds)
        self.last_seconds = min(doubled, self.longest_seconds)
        return self.last_seconds

    def reset(self) -> None:
        """Start again with the first pause."""
        self.last_seconds = 0.0


def jittered(seconds: float, *, least: float = 0.0) -> float:
    """Return a random part of a pause, from `least` of it to all of it.

    Processes that fail at the same moment then do not retry at the same moment.
    """
    return seconds * _random.uniform(least, 1.0)


async def kill(process: asyncio.subprocess.Process) -> None:
    """Kill a process, and wait for a moment until it is gone."""
    # Not Process.kill: it would reap a process that has just died, and asyncio waits for its exit
    # status.
    with suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGKILL)
    # asyncio reports the exit only after both pipes are read to the end, and nothing reads them
    # now.
    with suppress(TimeoutError):
        async with asyncio.timeout(END_SECONDS):
            await asyncio.shield(process.wait())
