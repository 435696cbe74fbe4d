"""Ending background tasks, and what a loop that talks to Redis does to be stoppable."""

import asyncio
from collections.abc import Coroutine
from typing import Any, Final

CANCEL_AGAIN_SECONDS: Final = 0.1

_background: set[asyncio.Task[None]] = set()


def in_background(work: Coroutine[Any, Any, None]) -> None:
    """Run something to its end that nobody waits for."""
    task = asyncio.ensure_future(work)
    _background.add(task)
    task.add_done_callback(_background.discard)


async def end_task(task: asyncio.Task[Any]) -> None:
    """Cancel a task and wait until it has ended; how it ended does not matter any more.

    Once may not be enough: up to Python 3.11 asyncio.wait_for, in which the Redis client sends, can
    swallow a cancellation.
    """
    while not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=CANCEL_AGAIN_SECONDS)


def raise_if_cancelled() -> None:
    """Raise CancelledError if this task was cancelled, even if nobody heard.

    redis-py (8.1) sends with `asyncio.wait_for`, which in Python 3.11 swallows a cancellation that comes just
    when the sending is done. A loop that does not look would then run on, and the process never end.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
