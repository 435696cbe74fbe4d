"""A worker's link to Redis, independent of its engine: queue, leases, and unsent replies.

If an engine dies, another one replaces it. Frame numbers continue without a gap, and leases of
returned jobs are released as soon as the last frame is written.
"""

import asyncio
import logging
import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass
from functools import partial

from redis.asyncio import Redis
from redis.exceptions import RedisError

from common.tasks import end_task
from contract import keys
from contract.messages import GenerationJob, about
from contract.prompts import CHUNK_BYTES, chunk_names
from contract.queue import JobQueue
from contract.scripts.cluster import shared_connection
from contract.scripts.executor import SharedConnection
from worker import telemetry
from worker.queue.held import HeldDigests
from worker.queue.leases import Leases
from worker.queue.replies import ReplyWriter
from worker.redis_client import REDIS_TIMEOUT_SECONDS
from worker.retries import repeat

_log = logging.getLogger(__name__)


class PromptChunks:
    """Chunks of long prompts, which later turns of a chat repeat: kept in memory or read again.

    One worker keeps at most `most_bytes` bytes.

    If there is no more room, the tenant with most chunks loses the one that it used least recently.
    """

    def __init__(self, queue: JobQueue, *, most_bytes: int) -> None:
        self._queue = queue
        self._most = most_bytes // CHUNK_BYTES
        self._number = 0
        self._held: defaultdict[str, dict[bytes, bytes]] = defaultdict(dict)
        """Chunks by name for each tenant, in the order of their last use."""

    async def whole(self, job: GenerationJob) -> GenerationJob | None:
        """Return a job with its whole prompt; None if it cannot be read."""
        if not job.chunks:
            return job
        names, held = chunk_names(job.chunks, job.rest), self._held[job.tenant]
        known = {name: held[name] for name in names if name in held}
        try:
            whole, chunks = await self._queue.with_prompt(job, known)
        except (RedisError, OSError) as error:
            _log.warning("Cannot read a prompt: %s", type(error).__name__)
            whole, chunks = None, {}
        self._drop(job.tenant, names)
        if whole is None:
            telemetry.PROMPT_CHUNKS.labels("lost").inc(len(names) - len(known))
            _log.warning("Job %s: its prompt is incomplete", job.id, extra=about(job))
            return None
        telemetry.PROMPT_CHUNKS.labels("held").inc(len(known))
        telemetry.PROMPT_CHUNKS.labels("read").inc(len(names) - len(known))
        self._keep(job.tenant, chunks)
        return whole

    def _keep(self, tenant: str, chunks: dict[bytes, bytes]) -> None:
        self._held[tenant].update(chunks)
        self._number += len(chunks)
        while self._number > self._most:
            most = max(self._held, key=lambda each: len(self._held[each]))
            self._drop(most, [next(iter(self._held[most]))])

    def _drop(self, tenant: str, names: Iterable[bytes]) -> None:
        held = self._held[tenant]
        self._number -= sum(held.pop(name, None) is not None for name in names)
        if not held:
            del self._held[tenant]


GRACE_SECONDS = 5.0
"""Time a gateway may be missing, as after a Redis restart, before its jobs are aborted."""

ASK_SECONDS = 0.25
"""After which a gateway whose server does not respond counts as alive until the next check."""

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
            found = await pipeline.execute(raise_on_error=False) if names else []
            # A gateway whose server does not respond counts as alive until then.
            missing = [name for name, exists in zip(names, found, strict=True) if not exists]
            for name in missing:
                # A frame written after the gateway left may have re-created its stream.
                _ = pipeline.expire(keys.replies(name), round(GONE_SECONDS))
            if missing:
                await pipeline.execute(raise_on_error=False)
        now = asyncio.get_running_loop().time()
        self._alive = set(names).difference(missing)
        self._missing_since = {name: self._missing_since.get(name, now) for name in missing}

    async def is_alive(self, gateway: str) -> bool:
        """Whether a gateway is alive, as of about the last second.

        One that this worker has served may be missing for a while: Redis may have been away for it.
        """
        if gateway in self._alive:
            return True
        try:
            # Other jobs of the same claim wait for this.
            async with asyncio.timeout(ASK_SECONDS):
                is_alive = bool(await self._redis.exists(keys.gateway_alive(gateway)))
        except (RedisError, OSError):
            is_alive = True  # Assume so; `check` repeats it.
        if is_alive:
            self._alive.add(gateway)
            return True
        since = self._missing_since.get(gateway, -math.inf)
        return asyncio.get_running_loop().time() - since < GRACE_SECONDS

    def missing_for(self, seconds: float) -> set[str]:
        """Return the gateways that have been missing for at least this long."""
        now = asyncio.get_running_loop().time()
        return {name for name, since in self._missing_since.items() if now - since >= seconds}


@dataclass(eq=False)
class Link:
    """One worker's connection to the queue of its model and to the gateways."""

    redis: Redis
    """For reads that block."""
    model: str
    _: KW_ONLY
    worker: str
    lease_ms: int
    most_pending_deltas: int
    chunk_cache_bytes: int = 0

    def __post_init__(self) -> None:
        self._shared = shared_connection(
            self.redis, partial(SharedConnection, timeout_seconds=REDIS_TIMEOUT_SECONDS)
        )
        self.queue = JobQueue(self._shared, self.model)
        self.leases = Leases(self.queue, self.worker, lease_ms=self.lease_ms)
        self.held = HeldDigests(self.queue, self.worker)
        """What makes claims prefer jobs for this worker."""
        self.prompts = PromptChunks(self.queue, most_bytes=self.chunk_cache_bytes)
        self.gateways = GatewayWatch(self.redis)
        self.writer = ReplyWriter(
            self._shared, self.worker, self.most_pending_deltas, self.leases.written
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

    async def aclose(self) -> None:
        """Fail all commands without a reply. They would connect again when the client is closed."""
        await self._shared.aclose()
