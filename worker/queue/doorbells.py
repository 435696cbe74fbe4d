"""Doorbells: wait until jobs arrive in the lanes of a queue."""

import asyncio
from collections.abc import Iterable
from functools import partial
from typing import Any, Final, Literal

from redis.asyncio import Redis

from common.tasks import end_task
from contract import keys
from contract.scripts.cluster import shared_connection
from contract.scripts.executor import SharedConnection
from contract.tier import Lane

OWN: Final = "own"
Bell = Lane | Literal["own"]
"""What rings for jobs of a lane, or `worker`'s own doorbell."""

WAIT_SECONDS = 3
"""Longest wait for a doorbell, a safety net for lost tokens."""


class Doorbells:
    """The doorbells of one model, each awaited by at most one command on a connection of its own.

    A pending BLPOP is never cancelled: Redis might pop a token for a closed connection. The next
    `wait` reuses the command.
    """

    def __init__(self, redis: "Redis", model: str, worker: str, *, timeout_seconds: float) -> None:
        """Waits for requests include `worker`'s own doorbell."""
        own = keys.worker_doorbell(model, worker)
        self._doorbells: dict[Bell, list[str]] = {
            OWN: [own],
            **{lane: [keys.doorbell(model, lane)] for lane in Lane},
        }
        self._doorbells[Lane.REQUESTS].insert(0, own)
        connect = partial(SharedConnection, timeout_seconds=timeout_seconds)
        self._connections = {bell: shared_connection(redis, connect) for bell in self._doorbells}
        self._rings: dict[Bell, asyncio.Future[Any]] = {}

    async def wait(
        self, bells: Iterable[Bell], event: asyncio.Event | None = None, *, seconds: float = 0.0
    ) -> bool:
        """Wait for one of these doorbells, or for the event.

        The wait ends after `seconds`, if they are not 0, or WAIT_SECONDS.

        Returns whether a doorbell rang, perhaps one of an earlier call. The caller must
        then claim jobs, even without room: `job_claim` wakes another worker if jobs remain.
        """
        for bell in bells:
            if bell not in self._rings:
                self._rings[bell] = self._connections[bell].execute_command(
                    "BLPOP", *self._doorbells[bell], WAIT_SECONDS
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
        done = [self._rings.pop(bell) for bell, ring in [*self._rings.items()] if ring.done()]
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
