"""Thread pool for work on large inputs, which would block the event loop."""

import asyncio
import contextlib
import contextvars
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Final, Protocol, TypeVar

from gateway.platform.concurrency.fair_turns import FairTurns

INLINE_SIZE: Final = 8_192
"""Smaller inputs (bytes, characters or token ids) run in the event loop, in under a millisecond."""
MOST_THREADS: Final = 8
WAIT_SECONDS: Final = 10.0
NICENESS: Final = 10

T = TypeVar("T")


class Beside(Protocol):
    """Runs work for one request."""

    async def __call__(self, work: Callable[[], T], *, size: int = 0) -> T:
        """Run `work` and return its result, in a thread if the request's body or `size` is large.

        Raises what `work` and `FairTurns.take` raise.
        """


class LargeWork:
    """Threads that parse, render and encode large inputs, which would block the event loop.

    There are half as many threads as processors, so that one is always left for the event loop. The
    gateway processes of one supervisor divide the processors.
    """

    def __init__(self, *, most_waiting_bytes: int, processes: int = 1) -> None:
        """Set up without threads. At most `most_waiting_bytes` of one tenant's inputs may wait.

        `processes` is the number of gateway processes of the supervisor.
        """
        processors = len(os.sched_getaffinity(0)) // processes
        threads = min(MOST_THREADS, max(1, processors // 2))
        self._executor = ThreadPoolExecutor(
            threads, thread_name_prefix="large-work", initializer=_lower_priority
        )
        self._turns = FairTurns(
            threads,
            most_waiting_size=most_waiting_bytes,
            wait_seconds=WAIT_SECONDS,
            what="large requests",
            rests=True,
        )

    def of(self, tenant_id: str, *, size: int) -> Beside:
        """Return the runner for a tenant's request whose body has `size` bytes."""
        return partial(self._beside, tenant_id, size)

    async def _beside(
        self, tenant_id: str, least: int, work: Callable[[], T], *, size: int = 0
    ) -> T:
        size = max(size, least)
        return work() if size <= INLINE_SIZE else await self._run(tenant_id, work, size)

    async def _run(self, tenant_id: str, work: Callable[[], T], size: int) -> T:
        await self._turns.take(tenant_id, size=size)
        loop = asyncio.get_running_loop()
        spent: list[float] = []
        future = self._executor.submit(contextvars.copy_context().run, _timed, work, spent)

        def ended(_: Future[T]) -> None:
            seconds = sum(spent)
            # The loop is closed if the process exits meanwhile.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(
                    partial(self._turns.give_back, tenant_id, seconds=seconds)
                )

        # Cancelling the caller does not stop the thread, so the thread frees the slot when it ends.
        future.add_done_callback(ended)
        try:
            return await asyncio.wrap_future(future)
        finally:
            # Its exception refers to this frame; the cycle would keep the request's body.
            del future

    def close(self) -> None:
        """Stop accepting work."""
        self._executor.shutdown(wait=False, cancel_futures=True)


def _lower_priority() -> None:
    """Give the event loop, and other processes on a small machine, priority for the processor."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


def _timed(work: Callable[[], T], spent: list[float]) -> T:
    began = time.thread_time()
    try:
        return work()
    finally:
        spent.append(time.thread_time() - began)
