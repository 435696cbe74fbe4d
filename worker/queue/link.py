"""A worker's link to Redis, independent of its engine: queue, leases, and unsent replies.

If an engine dies, another one replaces it. Frame numbers continue without a gap, and leases of
returned jobs are released as soon as the last frame is written.
"""

import asyncio
from collections.abc import Iterable

from redis.asyncio import Redis
from redis.exceptions import RedisError

from common.tasks import end_task
from contract import keys
from contract.queue import JobQueue
from contract.scripts.executor import SharedConnection
from worker.queue.chunks import PromptChunks
from worker.queue.held import HeldDigests
from worker.queue.leases import Leases
from worker.queue.replies import ReplyWriter
from worker.redis_client import REDIS_TIMEOUT_SECONDS
from worker.retries import repeat

GRACE_SECONDS = 5.0
"""Time a gateway may be missing, as after a Redis restart, before its running jobs are aborted."""

GONE_SECONDS = 600.0
"""Time after which a missing gateway cannot return under the same id."""


class GatewayWatch:
    """Caches which gateways were alive at the last check."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._alive: set[str] = set()
        self._missing_since: dict[str, float] = {}

    async def check(self, gateways: Iterable[str]) -> None:
        """Check these gateways and drop the state of all others."""
        names = list(gateways)
        async with self._redis.pipeline(transaction=False) as pipeline:
            for name in names:
                _ = pipeline.exists(keys.gateway_alive(name))
            found = await pipeline.execute() if names else []
            missing = [name for name, exists in zip(names, found, strict=True) if not exists]
            for name in missing:
                # A frame written after the gateway left may have re-created its stream.
                _ = pipeline.expire(keys.replies(name), round(GONE_SECONDS))
            if missing:
                await pipeline.execute()
        now = asyncio.get_running_loop().time()
        self._alive = set(names).difference(missing)
        self._missing_since = {name: self._missing_since.get(name, now) for name in missing}

    async def is_alive(self, gateway: str) -> bool:
        """Whether a gateway is alive, as of about the last second."""
        if gateway in self._alive:
            return True
        try:
            is_alive = bool(await self._redis.exists(keys.gateway_alive(gateway)))
        except (RedisError, OSError):
            return True  # Assume so; `check` repeats it.
        if is_alive:
            self._alive.add(gateway)
        return is_alive

    def missing_for(self, seconds: float) -> set[str]:
        """Return the gateways that have been missing for at least this long."""
        now = asyncio.get_running_loop().time()
        return {name for name, since in self._missing_since.items() if now - since >= seconds}


class Link:
    """One worker's connection to the queue of its model and to the gateways."""

    def __init__(
        self,
        redis: Redis,
        model: str,
        *,
        worker: str,
        lease_ms: int,
        most_pending_deltas: int,
        chunk_cache_bytes: int = 0,
    ) -> None:
        self.redis = redis
        """For reads that block."""
        shared = SharedConnection(redis, timeout_seconds=REDIS_TIMEOUT_SECONDS)
        self.queue = JobQueue(shared, model)
        self.worker = worker
        self.lease_ms = lease_ms
        self.leases = Leases(self.queue, worker, lease_ms=lease_ms)
        self.held = HeldDigests(self.queue, worker)
        """What makes claims prefer jobs for this worker."""
        self.prompts = PromptChunks(self.queue, most_bytes=chunk_cache_bytes)
        self.gateways = GatewayWatch(redis)
        self.writer = ReplyWriter(
            shared,
            worker,
            most_pending_deltas=most_pending_deltas,
            on_written=self.leases.written,
        )

    async def run(self) -> None:
        """Write replies and settle leases until cancelled."""
        tasks = [
            asyncio.create_task(self.writer.run()),
            asyncio.create_task(repeat("end leases", self.leases.settle)),
        ]
        try:
            await asyncio.gather(*tasks)
        finally:
            await end_task(*tasks)
