"""Doorbells: wait until jobs arrive in the lanes of a queue."""

import asyncio
from collections.abc import Iterable
from typing import Any

from redis.asyncio import Redis

from common.tasks import end_task
from contract import keys
from contract.scripts.executor import SharedConnection
from contract.tier import Lane

WAIT_SECONDS = 3
"""Longest wait for a doorbell, a safety net for lost tokens."""


class Doorbells:
    """The doorbells of one model, each awaited by at most one command on a connection of its own.

    A pending BLPOP is never cancelled: Redis might pop a token for a closed connection. The next
    `wait` reuses the command.
    """

    def __init__(self, redis: "Redis", model: str, worker: str, *, timeout_seconds: float) -> None:
        """Waits for requests include `worker`'s own doorbell."""
        self._doorbells = {lane: [keys.doorbell(model, lane)] for lane in Lane}
        self._doorbells[Lane.REQUESTS].insert(0, keys.worker_doorbell(model, worker))
        self._connections = {
            lane: SharedConnection(redis, timeout_seconds=timeout_seconds) for lane in Lane
        }
        self._rings: dict[Lane, asyncio.Future[Any]] = {}

    async def wait(
        self, lanes: Iterable[Lane], event: asyncio.Event | None = None, *, seconds: float = 0.0
    ) -> bool:
        """Wait for a doorbell of these lanes, or for the event.

        The wait ends after `seconds`, if they are not 0, or WAIT_SECONDS.

        Returns whether a doorbell rang, perhaps of a lane of an earlier call. The caller must
        then claim jobs, even without room: `job_claim` wakes another worker if jobs remain.
        """
        for lane in lanes:
            if lane not in self._rings:
                self._rings[lane] = self._connections[lane].execute_command(
                    "BLPOP", *self._doorbells[lane], WAIT_SECONDS
                )
        waits: list[asyncio.Future[Any]] = list(self._rings.values())
        if event is not None:
            waits.append(asyncio.create_task(event.wait()))
        try:
            await asyncio.wait(
                waits,
                timeout=min(seconds or WAIT_SECONDS, WAIT_SECONDS),
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            if event is not None:
                await end_task(waits[-1])
        done = [self._rings.pop(lane) for lane, ring in [*self._rings.items()] if ring.done()]
        return any(not ring.cancelled() and ring.result() is not None for ring in done)

    def cancel(self) -> None:
        """End a wait. Call `aclose` afterwards: Redis may still give tokens to the commands."""
        for ring in self._rings.values():
            ring.cancel()

    async def aclose(self) -> None:
        """Wait for no doorbell any longer."""
        self.cancel()
        self._rings.clear()
        for connection in self._connections.values():
            await connection.aclose()
