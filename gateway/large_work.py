"""Work on large inputs, done in threads beside the event loop."""

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

from gateway.turns import FairTurns

INLINE_SIZE: Final = 8_192
"""Smaller inputs (in bytes, characters or token ids) are processed in the event loop, in under a millisecond."""
MOST_THREADS: Final = 8
WAIT_SECONDS: Final = 10.0
NICENESS: Final = 10

T = TypeVar("T")


class Beside(Protocol):
    """Runs the work of one request."""

    async def __call__(self, work: Callable[[], T], *, size: int = 0) -> T:
        """Run `work` and return its result: in a thread if the request's body or `size` is large.

        Raises what `work` raises, and what `FairTurns.take` raises.
        """


class LargeWork:
    """Threads that parse, render and encode large inputs, which would hold the event loop.

    There are half as many as processors, so that the event loop always has one.
    """

    def __init__(self, *, most_waiting_bytes: int) -> None:
        """Start no thread yet. Of one tenant, inputs of `most_waiting_bytes` may wait for a thread."""
        threads = min(MOST_THREADS, max(1, len(os.sched_getaffinity(0)) // 2))
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
        least = size

        async def beside(work: Callable[[], T], *, size: int = 0) -> T:
            size = max(size, least)
            return work() if size <= INLINE_SIZE else await self._run(tenant_id, work, size)

        return beside

    async def _run(self, tenant_id: str, work: Callable[[], T], size: int) -> T:
        await self._turns.take(tenant_id, size=size)
        loop = asyncio.get_running_loop()
        spent: list[float] = []
        future = self._executor.submit(contextvars.copy_context().run, _timed, work, spent)

        def ended(_: Future[T]) -> None:
            seconds = sum(spent)
            # The loop is closed if the process ends meanwhile.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(
                    partial(self._turns.give_back, tenant_id, seconds=seconds)
                )

        # A cancelled caller does not stop the thread, so the slot is freed when the thread is done.
        future.add_done_callback(ended)
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """Accept no more work."""
        self._executor.shutdown(wait=False, cancel_futures=True)


def _lower_priority() -> None:
    """Let the event loop, and other processes of a small machine, have the processor first."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


def _timed(work: Callable[[], T], spent: list[float]) -> T:
    began = time.thread_time()
    try:
        return work()
    finally:
        spent.append(time.thread_time() - began)
