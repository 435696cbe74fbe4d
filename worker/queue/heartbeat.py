"""Heartbeats: a thread that keeps the worker's lease, and the connection that shows its end.

The thread has its own event loop and connections, so the worker's work cannot starve it. It
subscribes to the worker's channel. If the process ends, the kernel closes the connection, and
gateways give the worker's jobs to other workers at once. If the machine or its network fails, or
the process is stopped, the lease expires.

The thread also sends heartbeats while the worker's event loop is blocked. The leases of jobs, which
that loop extends, cover this case.
"""

import asyncio
import contextlib
import logging
import os
import time
from typing import Any

from redis.asyncio import Redis
from redis.asyncio.client import PubSub
from redis.exceptions import NoPermissionError, RedisError

from common.loop_thread import LoopThread
from common.redis_cluster import server_of
from common.redis_private import transport_of
from contract import keys
from contract.queue import JobQueue
from worker import telemetry
from worker.redis_client import connect

_log = logging.getLogger(__name__)

BEATS_PER_LEASE = 6
_AGAIN_SECONDS = 0.05
"""Pause after a failure: shorter than the time for which a worker may be missing."""
_UNWATCHED_SECONDS = 1.0


class WorkerHeartbeat:
    """The thread of one worker process."""

    def __init__(self, redis_url: str, model: str, worker: str, *, lease_ms: int) -> None:
        self._redis_url = redis_url
        self._model = model
        self._worker = worker
        self._lease_ms = lease_ms
        self._thread = LoopThread(self._run, name="heartbeat", on_failure=_report)
        self._has_failed = False
        self._last_beat_at: float | None = None
        self._subscription: PubSub | None = None

    def start(self) -> None:
        """Start the thread. Call it once."""
        # An engine's processes may be forks; their copies would keep the connection open.
        os.register_at_fork(after_in_child=self._close_copy)
        self._thread.start()

    async def aclose(self) -> None:
        """End the lease and the thread, if it was started. The worker must hold no job."""
        await self._thread.aclose()

    # -- in the thread ---------------------------------------------------------------------------

    async def _run(self) -> None:
        # A heartbeat that gets no reply must leave time for another one.
        seconds = self._lease_ms / 1000 / 2
        async with connect(self._redis_url, timeout_seconds=seconds) as redis:
            queue = JobQueue(redis, self._model)
            try:
                while not self._thread.is_closing:
                    await self._keep_lease(redis, queue)
            finally:
                with contextlib.suppress(RedisError, OSError):
                    await queue.beat(self._worker, lease_ms=0)

    async def _keep_lease(self, redis: Redis, queue: JobQueue) -> None:
        """Subscribe and send heartbeats until that fails."""
        pause_seconds = _AGAIN_SECONDS
        try:
            channel = keys.worker_channel(self._model, self._worker)
            # The script of heartbeats sees the subscriptions to its own server.
            server = await server_of(redis, channel)
            async with server.pubsub(ignore_subscribe_messages=True) as subscription:
                self._subscription = subscription
                await subscription.subscribe(channel)
                # The first message confirms the subscription. Later ones only end the pause.
                await subscription.get_message(timeout=self._lease_ms / 1000)
                while await self._beat(queue):
                    await subscription.get_message(timeout=self._lease_ms / 1000 / BEATS_PER_LEASE)
            cause = "Redis does not show the subscription to the worker's channel"
            pause_seconds = _UNWATCHED_SECONDS
        except Exception as error:
            cause = repr(error)
            if isinstance(error, NoPermissionError):
                pause_seconds = _UNWATCHED_SECONDS
            # If only the subscription failed, the worker must not count as gone.
            with contextlib.suppress(RedisError, OSError):
                await queue.beat(self._worker, lease_ms=self._lease_ms)
        if not self._has_failed:
            self._has_failed = True
            _log.warning("Could not send heartbeats, retrying: %s", cause)
        await asyncio.sleep(pause_seconds)

    async def _beat(self, queue: JobQueue) -> bool:
        is_watched = await queue.beat(self._worker, lease_ms=self._lease_ms)
        if is_watched:
            now = time.monotonic()
            if self._last_beat_at is not None:
                telemetry.HEARTBEAT_GAP.observe(now - self._last_beat_at)
            self._last_beat_at = now
            if self._has_failed:
                self._has_failed = False
                _log.info("Recovered: send heartbeats")
        return is_watched

    # -- in a fork -------------------------------------------------------------------------------

    def _close_copy(self) -> None:
        """Close this process's copy of the subscription's connection."""
        connection: Any = self._subscription and self._subscription.connection
        if connection is not None and connection.is_connected:
            copy = transport_of(connection).get_extra_info("socket")
            # The descriptor stays valid: the socket object closes it when it is collected.
            os.dup2(os.open(os.devnull, os.O_RDWR), copy.fileno())


def _report(error: Exception) -> None:
    _log.critical("The heartbeat thread ended", exc_info=error)
