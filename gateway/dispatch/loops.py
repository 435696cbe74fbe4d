"""What every loop that talks to Redis has to do to be stoppable."""

import asyncio


def raise_if_cancelled() -> None:
    """Raise CancelledError if this task was cancelled, even if nobody heard.

    redis-py (8.1) sends with `asyncio.wait_for`, which in Python 3.11 swallows a cancellation that comes just
    when the sending is done. A loop that does not look would then run on, and the process never end.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
