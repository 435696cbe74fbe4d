"""Cancel background tasks, and keep loops that use Redis cancellable."""

import asyncio
from collections.abc import Coroutine
from typing import Any, Final

CANCEL_AGAIN_SECONDS: Final = 0.1

_background: set[asyncio.Task[None]] = set()


def in_background(work: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine to its end in the background."""
    task = asyncio.ensure_future(work)
    _background.add(task)
    task.add_done_callback(_background.discard)


async def end_task(task: asyncio.Task[Any]) -> None:
    """Cancel a task and wait until it has ended, whatever its outcome.

    One cancellation may not suffice: up to Python 3.11, asyncio.wait_for, which the Redis client
    uses to send, can swallow it.
    """
    while not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=CANCEL_AGAIN_SECONDS)


def raise_if_cancelled() -> None:
    """Raise CancelledError if this task was cancelled, even if the cancellation was swallowed.

    redis-py (8.1) sends with `asyncio.wait_for`, which in Python 3.11 swallows a cancellation that
    arrives just when the send completes. A loop without this check would keep running, and the
    process would never exit.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
