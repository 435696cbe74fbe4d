"""Object writer: writes objects of requests without disturbing the requests' clients."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final

from common.tasks import TaskSet
from gateway.platform import telemetry
from gateway.records.errors import ApiError, StoreUnavailableError

WRITES_AT_ONCE: Final = 8
MOST_UNWRITTEN_BYTES: Final = 67_108_864
"""Bytes that wait to be written. While the store is slow, further objects are dropped."""

logger = logging.getLogger(__name__)


class ObjectWriter:
    """Writes objects in tasks, as many as memory allows, and drops what cannot be written."""

    def __init__(self, tasks: TaskSet, what: str) -> None:
        """Run in `tasks`. `what` an object is, such as `kept_response`, is for log and metric."""
        self._tasks = tasks
        self._what = what
        self._dropped = telemetry.OBJECTS_DROPPED.labels(what)
        self._turns = asyncio.Semaphore(WRITES_AT_ONCE)
        self._unwritten_bytes = 0

    def write(
        self, making: Awaitable[bytes], put: Callable[[bytes], Awaitable[None]]
    ) -> asyncio.Task[None]:
        """Write an object that is being made, or log why that fails, in a task."""
        return self._tasks.task(self._write(making, put))

    async def _write(
        self, making: Awaitable[bytes], put: Callable[[bytes], Awaitable[None]]
    ) -> None:
        size = 0
        try:
            content = await making
            if self._unwritten_bytes + len(content) > MOST_UNWRITTEN_BYTES:
                raise StoreUnavailableError("Too many objects wait to be written.")
            size = len(content)
            self._unwritten_bytes += size
            async with self._turns:
                await put(content)
        except ApiError as error:
            self._dropped.inc()
            logger.warning("cannot write an object (%s): %s", self._what, error)
        finally:
            self._unwritten_bytes -= size
