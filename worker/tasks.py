"""Ending asyncio tasks for certain."""

import asyncio
from collections.abc import Iterable
from typing import Any

_CANCEL_AGAIN_SECONDS = 0.2


async def cancel(tasks: Iterable["asyncio.Future[Any]"]) -> None:
    """Cancel tasks and wait until they have ended, whatever their outcome.

    A client that is just timing out or reconnecting may turn a cancellation into an error of its own,
    after which a loop that goes on after errors would go on: so cancel until it works.
    """
    pending = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        done, pending = await asyncio.wait(pending, timeout=_CANCEL_AGAIN_SECONDS)
        for task in done:
            if not task.cancelled():
                task.exception()
