"""Silent jobs: query Redis about jobs without recent replies.

Such a job may have waited too long for a worker, been lost by Redis or been taken over by another
gateway. It may also have ended, with the reply lost.
"""

import time

from redis.asyncio import Redis

from contract import clock, keys
from contract.outcomes import FailureCode
from contract.tier import ServiceTier
from gateway.dispatch.catalogue import Catalogue
from gateway.dispatch.jobs import JobsInFlight
from gateway.dispatch.presence import Presence
from gateway.dispatch.recovery import Recoveries
from gateway.dispatch.ticket import Ticket

SILENCE_SECONDS = 5.0
"""Redis is queried about a job after this long without a reply, and again after each interval."""
UNSERVED_SECONDS = 15.0
"""A job that no worker has begun fails after its model had no worker for this long, unless a
worker is started for waiting jobs.

Announcements expire after five seconds. A worker that was disconnected, stopped or restarted
needs a few more seconds to announce its model again.
"""


class SilentJobs:
    """Finds silent jobs and decides about each by its state in Redis."""

    def __init__(
        self,
        client: "Redis",
        catalogue: Catalogue,
        *,
        presence: Presence,
        jobs: JobsInFlight,
        recoveries: Recoveries,
        queue_timeout_seconds: float,
    ) -> None:
        self._client = client
        self._catalogue = catalogue
        self._presence = presence
        self._jobs = jobs
        self._recoveries = recoveries
        self._queue_timeout_seconds = queue_timeout_seconds

    async def check(self) -> None:
        """Query Redis about silent jobs, and retry or fail them. Raises RedisError."""
        if not self._presence.is_steady:
            return
        if not self._presence.is_announced:
            # Workers drop jobs of a gateway that has no heartbeat in an emptied Redis.
            await self._presence.beat()
        await self._jobs.drop_again()
        now = time.monotonic()
        silent = [
            ticket
            for ticket in self._jobs.tickets.values()
            if ticket.is_followed
            and max(ticket.check_at, ticket.last_reply_at + SILENCE_SECONDS) < now
        ]
        if not silent:
            return
        pipeline = self._client.pipeline(transaction=False)
        for ticket in silent:
            ticket.check_at = now + SILENCE_SECONDS
            key = keys.job(ticket.model, ticket.job.id)
            pipeline.execute_command("HMGET", key, "worker", "ended", "gateway", "attempt")
        states = await pipeline.execute()
        for ticket, state in zip(silent, states, strict=True):
            # A reply may have arrived during the query.
            if ticket.last_reply_at <= now and ticket.is_followed:
                self._judge(ticket, *state, now=now)

    def _judge(
        self,
        ticket: Ticket,
        worker: bytes | None,
        ended: bytes | None,
        gateway: bytes | None,
        attempt: bytes | None,
        *,
        now: float,
    ) -> None:
        """Decide about a silent job by its state in Redis; if `worker` is empty, it waits."""
        if worker is None and ended is None:
            self._recoveries.retry(ticket, "forgotten")
        elif gateway is not None and gateway.decode() != self._presence.gateway:
            self._jobs.fail(ticket, FailureCode.TAKEN_OVER)
        elif ended is not None:
            if ticket.retries.miss_completion():
                self._recoveries.retry(ticket, "replies_lost")
        elif int(attempt or 0) + (worker == b"") < ticket.attempt:
            # A Redis failover lost the requeue of this job.
            self._recoveries.retry(ticket, "forgotten")
        elif worker == b"":
            self._judge_waiting(ticket, now)

    def _judge_waiting(self, ticket: Ticket, now: float) -> None:
        if ticket.job.service_tier is ServiceTier.BATCH:
            # It waits while others go first, and while its model has no worker.
            if ticket.job.deadline_ms <= clock.now_ms():
                self._jobs.fail(ticket, FailureCode.DEADLINE_EXCEEDED)
            return
        unserved_seconds = self._catalogue.unserved_seconds(ticket.model)
        model = self._catalogue.known(ticket.model)
        is_asleep = model is not None and model.is_asleep
        is_overdue = now - ticket.enqueued_at > self._queue_timeout_seconds
        if ticket.is_resumed:
            if is_overdue:
                self._jobs.fail(ticket, FailureCode.WORKER_LOST)
        elif is_overdue and not is_asleep:
            self._jobs.fail(ticket, FailureCode.QUEUE_TIMEOUT)
        elif is_overdue or (unserved_seconds > UNSERVED_SECONDS and not is_asleep):
            self._jobs.fail(ticket, FailureCode.NO_WORKER)
