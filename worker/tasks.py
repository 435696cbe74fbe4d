"""Cancellation of asyncio tasks that also works if a task suppresses it once."""

import asyncio
from collections.abc import Iterable
from typing import Any

_CANCEL_AGAIN_SECONDS = 0.2


async def cancel(tasks: Iterable["asyncio.Future[Any]"]) -> None:
    """Cancel tasks and wait until they have ended, whatever their outcome.

    A client that times out or reconnects may convert a cancellation into another error. A loop that
    continues after errors would then keep running, so cancel repeatedly until the task ends.
    """
    pending = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        done, pending = await asyncio.wait(pending, timeout=_CANCEL_AGAIN_SECONDS)
        for task in done:
            if not task.cancelled():
                task.exception()
