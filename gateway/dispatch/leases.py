"""Expired leases: take jobs back from workers that are gone, or no longer extend their leases."""

import logging
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError

from contract import keys
from contract.messages import JobLost
from contract.queue import LostJob
from contract.tasks import in_background
from gateway import telemetry
from gateway.dispatch.catalogue import Catalogue
from gateway.dispatch.jobs import JobsInFlight
from gateway.dispatch.notices import ResponseNotices, send_notices
from gateway.dispatch.presence import Presence
from gateway.dispatch.recovery import Recoveries
from gateway.dispatch.states import RECOVERING

logger = logging.getLogger(__name__)


class ExpiredLeases:
    """Reclaims the expired leases of all gateways' jobs, and retries this gateway's jobs."""

    def __init__(
        self,
        client: "Redis",
        catalogue: Catalogue,
        *,
        presence: Presence,
        jobs: JobsInFlight,
        recoveries: Recoveries,
        notices: ResponseNotices,
    ) -> None:
        self._client = client
        self._catalogue = catalogue
        self._presence = presence
        self._jobs = jobs
        self._recoveries = recoveries
        self._notices = notices

    async def reclaim(self) -> None:
        """Reclaim expired leases, and notify the gateways of their jobs. Raises RedisError."""
        if not self._presence.is_steady:
            return
        for model in self._catalogue.models:
            queue = self._catalogue.queue(model.card.model)
            for worker in await queue.gone_workers():
                telemetry.GONE_WORKERS.inc()
                logger.warning("worker %s is gone; other workers resume its jobs", worker)
            for lost in await queue.reclaim():
                await self._report(model.card.model, lost)

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
        elif not is_ours and await self._client.exists(keys.gateway_alive(lost.gateway)):
            await send_notices(self._client, lost.gateway, sender=gateway, lost=[notice])
        elif not is_ours and not self._presence.may_judge_others():
            return
        elif is_ours or not await self._notices.offer_orphan(model, lost):
            # No client waits for it: its gateway is gone or has cancelled it.
            await self._catalogue.queue(model).cancel(lost.job_id, lost.tenant)

    async def _drop_unfollowed(self, lost: JobLost) -> None:
        """Remove a job of ours that is no longer in flight, unless another gateway took it over.

        If Redis is unavailable, the loss is reported again later.
        """
        try:
            owner: Any = await self._client.hget(keys.job(lost.model, lost.job_id), "gateway")
            if owner == self._presence.gateway.encode():
                await self._catalogue.queue(lost.model).cancel(lost.job_id, lost.tenant)
        except RedisError as error:
            logger.warning("cannot remove a job from the queue: %s", type(error).__name__)
