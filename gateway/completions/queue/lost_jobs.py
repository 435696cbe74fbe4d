"""Lost and silent jobs: take jobs back from workers, and query Redis about jobs without replies.

The lease of a lost job has expired: its worker is gone, or no longer extends it. A silent job may
have waited too long for a worker, been lost by Redis or been taken over by another gateway. It may
also have ended, with the reply lost.
"""

import logging
import math
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError

from common import clock
from common.tasks import each_apart, in_background, tolerating_outage
from contract import keys
from contract.messages import JobLost
from contract.outcomes import FailureCode
from contract.queue import LostJob
from contract.tier import ServiceTier
from gateway.completions.queue.jobs import JobsInFlight
from gateway.completions.queue.notices import ResponseNotices, send_notices
from gateway.completions.queue.presence import Presence
from gateway.completions.queue.recovery import Recoveries
from gateway.completions.queue.ticket import RECOVERING, Ticket
from gateway.models.catalogue import Catalogue
from gateway.platform import telemetry

AT_ONCE = 16
"""Models, and lost jobs of each."""
SILENCE_SECONDS = 5.0
"""Redis is queried about a job after this long without a reply, and again after each interval."""
IDLE_SECONDS = 1.0
"""Interval of looks for lost jobs and workers while nothing runs: a look takes two scripts."""
UNSERVED_SECONDS = 15.0
"""A job that no worker has begun fails after its model had no worker for this long, unless a
worker is started for waiting jobs.

Announcements expire after five seconds. A worker that was disconnected, stopped or restarted
needs a few more seconds to announce its model again.
"""

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class LostJobs:
    """Reclaims the expired leases of all gateways' jobs, and decides about this gateway's jobs."""

    _client: "Redis"
    _catalogue: Catalogue
    _presence: Presence
    _jobs: JobsInFlight
    _recoveries: Recoveries
    _notices: ResponseNotices
    _queue_timeout_seconds: float
    _reclaimed_at: float = -math.inf

    async def reclaim(self) -> None:
        """Reclaim expired leases, and notify the gateways of their jobs.

        A model or a job for which that fails delays no other. Does nothing for IDLE_SECONDS while
        no job is known to run. Raises RedisError at the end.
        """
        now = time.monotonic()
        is_idle = not (
            self._jobs.tickets or any(each.status.leased_jobs for each in self._catalogue.models)
        )
        if self._presence.is_steady and now >= self._reclaimed_at + is_idle * IDLE_SECONDS:
            self._reclaimed_at = now
            await each_apart(self._reclaim, self._catalogue.names, at_once=AT_ONCE)

    async def _reclaim(self, model: str) -> None:
        queue = self._catalogue.queue(model)
        for worker in await queue.gone_workers():
            telemetry.GONE_WORKERS.inc()
            logger.warning("worker %s is gone; other workers resume its jobs", worker)
        report = partial(self._report, model)
        await each_apart(report, await queue.reclaim(), at_once=AT_ONCE)

    def lose(self, lost: JobLost) -> None:
        """Retry a job whose lease has expired."""
        ticket = self._jobs.tickets.get(lost.handle)
        if ticket is None:
            in_background(self._drop_unfollowed(lost))
            return
        if ticket.state is RECOVERING or lost.attempt < ticket.attempt:
            return
        if lost.attempt > ticket.attempt:
            # The reply to our requeue was lost.
            ticket.follow(lost.attempt)
        self._recoveries.retry(ticket, "lease_expired")

    async def _report(self, model: str, lost: LostJob) -> None:
        gateway = self._presence.gateway
        notice = JobLost(lost.handle, lost.attempt, model, lost.job_id, lost.tenant)
        is_ours = lost.gateway == gateway
        if is_ours and lost.handle in self._jobs.tickets:
            self.lose(notice)
        elif not is_ours and await self._presence.is_alive(lost.gateway, self._catalogue.executor):
            executor = self._catalogue.executor
            await send_notices(executor, lost.gateway, sender=gateway, lost=[notice])
        elif is_ours or not await self._notices.on_orphan(model, lost):
            # No client waits for it: its gateway is gone or has cancelled it.
            await self._catalogue.queue(model).cancel(lost.job_id, lost.tenant)

    async def _drop_unfollowed(self, lost: JobLost) -> None:
        """Remove a job of ours that is no longer in flight, unless another gateway took it over.

        If Redis is unavailable, the loss is reported again later.
        """
        with tolerating_outage("remove a job from the queue"):
            owner: Any = await self._client.hget(keys.job(lost.model, lost.job_id), "gateway")
            if owner == self._presence.gateway.encode():
                await self._catalogue.queue(lost.model).cancel(lost.job_id, lost.tenant)

    async def check_silent(self) -> None:
        """Query Redis about silent jobs, and retry or fail them. Raises RedisError."""
        if not self._presence.is_steady:
            return
        await self._presence.ensure_announced(self._client)
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
        states = await pipeline.execute(raise_on_error=False)
        for ticket, state in zip(silent, states, strict=True):
            # A reply may have arrived during the query. Another query follows an error.
            is_known = not isinstance(state, RedisError)
            if is_known and ticket.last_reply_at <= now and ticket.is_followed:
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
