"""Thread for heartbeats, lease renewals and the event loop watchdog, independent of requests.

The thread has its own event loop and Redis connections. Without it, a request that blocks the
serving loop would make other gateways consider this one dead and settle its requests as lost.
"""

import asyncio
import contextlib
import ctypes
import logging
import os
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from redis.exceptions import RedisError

from common.loop_thread import LoopThread
from common.tasks import raise_if_cancelled
from gateway.completions.queue.presence import Presence
from gateway.http.front import served
from gateway.limits.reservations import Reservations
from gateway.limits.store import QuotaStore
from gateway.platform import telemetry
from gateway.platform.redis_client import connect, shared_connection
from gateway.platform.store_errors import cause_of

HEARTBEAT_SECONDS: Final = 2.0
RENEW_SECONDS: Final = 10.0
STUCK_SECONDS: Final = 60.0
"""Event loop silence after which it counts as dead: other gateways may resume its requests."""
WATCH_SECONDS: Final = 0.1
HELD_SECONDS: Final = 0.02
"""Maximum time that a request may block the event loop."""
POLL_SECONDS: Final = 0.005
LOG_SECONDS: Final = 1.0
"""Minimum time between two log lines of the watchdog."""
TRIM_SECONDS: Final = 5.0
TRIMMED_BYTES: Final = 16 * 1024 * 1024
"""Growth in memory use after which free memory is returned to the system."""

_CONNECTIONS: Final = 4
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Heartbeat:
    """The thread of one gateway. Create it in the event loop that serves requests."""

    _redis_url: str
    _presence: Presence
    _reservations: Reservations
    on_failure: Callable[[], None]
    """Called in the loop that serves requests after a bug in the thread."""

    def __post_init__(self) -> None:
        self._served_by = asyncio.get_running_loop()
        self._thread = LoopThread(self._run, name="heartbeat", on_failure=self._fail)
        self._serving_thread = threading.get_ident()
        self._clock = time.pthread_getcpuclockid(self._serving_thread)
        self._responded_at = time.monotonic()
        self._logged_at = 0.0

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    async def aclose(self) -> None:
        """Stop the thread."""
        await self._thread.aclose()

    # -- in the thread ---------------------------------------------------------------------------

    def _fail(self, error: Exception) -> None:
        logger.critical("the heartbeat thread ended; stopping", exc_info=error)
        with contextlib.suppress(RuntimeError):
            self._served_by.call_soon_threadsafe(self.on_failure)

    async def _run(self) -> None:
        client = connect(self._redis_url, max_connections=_CONNECTIONS)
        executor = shared_connection(client)
        try:
            async with asyncio.TaskGroup() as tasks:
                # The list of gateways may be on another server than this gateway's keys.
                for step in (self._presence.announce, self._presence.enlist):
                    tasks.create_task(self._repeat(partial(step, client), HEARTBEAT_SECONDS))
                store = QuotaStore(executor)
                tasks.create_task(self._repeat(lambda: self._renew(store), RENEW_SECONDS))
                tasks.create_task(self._watch())
                tasks.create_task(self._keep_trimming())
        finally:
            await executor.aclose()
            await client.aclose()

    async def _repeat(self, step: Callable[[], Awaitable[None]], seconds: float) -> None:
        while not self._thread.is_closing:
            if time.monotonic() - self._responded_at < STUCK_SECONDS:
                try:
                    await step()
                except RedisError as error:
                    logger.warning("cannot send heartbeats or renew leases: %s", cause_of(error))
                raise_if_cancelled()
            await asyncio.sleep(seconds)

    async def _renew(self, store: QuotaStore) -> None:
        unknown = await self._reservations.extend(store)
        if unknown:
            asyncio.run_coroutine_threadsafe(self._reservations.restore(unknown), self._served_by)

    async def _keep_trimming(self) -> None:
        """Return memory of large requests to the system, because glibc keeps it."""
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        low = _resident_bytes()
        while trim is not None and not self._thread.is_closing:
            await asyncio.sleep(TRIM_SECONDS)
            if _resident_bytes() > low + TRIMMED_BYTES:
                trim(0)
            # Memory that stays in use gradually becomes part of the baseline.
            low = min(low + TRIMMED_BYTES // 16, _resident_bytes())

    # -- the watch -------------------------------------------------------------------------------

    async def _watch(self) -> None:
        while not self._thread.is_closing:
            await self.check_loop()
            await asyncio.sleep(WATCH_SECONDS)

    async def check_loop(self) -> None:
        """Measure the serving loop's callback delay, and report what blocked it for too long."""
        used_before, asked_at = time.clock_gettime(self._clock), time.monotonic()
        self._served_by.call_soon_threadsafe(self._respond)
        await asyncio.sleep(HELD_SECONDS)
        route = place = ""
        while self._responded_at < asked_at:
            if not route:
                route, place = self._route(), self._place()
            if self._thread.is_closing or self._served_by.is_closed():
                return
            await asyncio.sleep(POLL_SECONDS)
        lag = self._responded_at - asked_at
        telemetry.LOOP_LAG.observe(lag)
        used = time.clock_gettime(self._clock) - used_before
        # Otherwise the machine or another thread was busy, not the loop.
        if route and min(lag, used) > HELD_SECONDS:
            telemetry.LOOP_HOLDS.labels(route).inc()
            if self._responded_at - self._logged_at > LOG_SECONDS:
                self._logged_at = self._responded_at
                logger.warning(
                    "the event loop was blocked for %d ms by %s, in %s", lag * 1000, route, place
                )

    def _respond(self) -> None:
        self._responded_at = time.monotonic()

    def _route(self) -> str:
        """Return the route of the request that currently runs in the loop."""
        task = asyncio.current_task(self._served_by)
        scope = None if task is None else served.get(task)
        return telemetry.BACKGROUND if scope is None else telemetry.route_label(scope)

    def _place(self) -> str:
        """Return the code location that the loop currently executes."""
        frame = sys._current_frames().get(self._serving_thread)  # noqa: SLF001 - no public API
        innermost = frame
        while frame is not None and not frame.f_globals.get("__name__", "").startswith("gateway"):
            frame = frame.f_back
        frame = frame or innermost
        return "?" if frame is None else f"{frame.f_code.co_qualname}:{frame.f_lineno}"


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES
