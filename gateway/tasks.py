"""Ending background tasks."""

import asyncio
from typing import Any, Final

CANCEL_AGAIN_SECONDS: Final = 0.1


async def end_task(task: asyncio.Task[Any]) -> None:
    """Cancel a task and wait until it has ended; how it ended does not matter any more.

    Once may not be enough: up to Python 3.11 asyncio.wait_for, in which the Redis client sends, can
    swallow a cancellation.
    """
    while not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=CANCEL_AGAIN_SECONDS)
