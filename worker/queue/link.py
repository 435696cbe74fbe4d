"""A worker's link to Redis, independent of its engine: queue, leases, and unsent replies.

If an engine dies, another one replaces it. Frame numbers continue without a gap, and leases of
returned jobs are released as soon as the last frame is written.
"""

import asyncio

from redis.asyncio import Redis

from contract.queue import JobQueue
from contract.scripts.executor import SharedConnection
from contract.tasks import end_task
from worker.queue.gateways import GatewayWatch
from worker.queue.held import HeldDigests
from worker.queue.leases import Leases
from worker.queue.replies import ReplyWriter
from worker.redis_client import REDIS_TIMEOUT_SECONDS
from worker.retries import repeat


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
