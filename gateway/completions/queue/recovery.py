"""Recovery: requeue the rest of a job for another worker when an attempt is over.

An attempt is over as soon as its ticket follows the next one. Later messages of it are not applied,
so another worker resumes exactly after the output received until then. Redis decides whether the
attempt is really over. Until Redis replies, messages of the attempt are kept; they are applied if
its worker still holds the job.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from redis.exceptions import RedisError

from common import clock
from common.tasks import Backoff, TaskSet, raise_if_cancelled
from contract.messages import AttemptMessage
from contract.outcomes import FailureCode
from contract.queue import RequeueResult
from gateway.completions.queue.jobs import JobsInFlight
from gateway.completions.queue.ticket import ENDED, GENERATING, Recovery, Ticket
from gateway.models.catalogue import Catalogue
from gateway.platform import telemetry

FIRST_PAUSE_SECONDS = 0.1
LONGEST_PAUSE_SECONDS = 1.0

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Recoveries:
    """All jobs of a gateway that are being recovered, each at most once at a time."""

    _catalogue: Catalogue
    _jobs: JobsInFlight
    _replay: Callable[[str, AttemptMessage], None]
    """Applies a message of a worker whose attempt turns out not to be over."""

    def __post_init__(self) -> None:
        self._tasks = TaskSet()

    def retry(self, ticket: Ticket, reason: telemetry.LossReason) -> None:
        """Let another worker resume a job, or fail the job if it may not be retried again."""
        code = ticket.retries.spend(reason, has_progressed=ticket.state is GENERATING)
        if code is not None:
            self._jobs.fail(ticket, code)
            return
        recovery = ticket.presume_over(reason)
        telemetry.RESUMED_JOBS.labels(reason).inc()
        logger.info(
            "attempt %d of job %s is over: %s",
            recovery.attempt,
            ticket.job.id,
            reason,
            extra=ticket.log_ids,
        )
        self._tasks.start(self._run(ticket, recovery))

    async def aclose(self) -> None:
        """Cancel all recoveries."""
        await self._tasks.cancel()

    async def _run(self, ticket: Ticket, recovery: Recovery) -> None:
        backoff = Backoff(FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS)
        while ticket.recovery is recovery:
            try:
                if recovery.is_revival:
                    await self._revive(ticket, recovery)
                else:
                    await self._requeue(ticket, recovery)
            except RedisError as error:
                logger.warning("cannot requeue a job: %s", type(error).__name__)
                raise_if_cancelled()
                if clock.now_ms() > ticket.job.deadline_ms and ticket.recovery is recovery:
                    self._jobs.fail(ticket, FailureCode.DEADLINE_EXCEEDED)
                await asyncio.sleep(backoff.next_seconds())
            raise_if_cancelled()

    async def _requeue(self, ticket: Ticket, recovery: Recovery) -> None:
        queue = self._catalogue.queue(ticket.model)
        result = await queue.requeue(
            recovery.job, recovery.attempt, is_returned=recovery.is_returned
        )
        if ticket.recovery is not recovery:
            return
        if result is RequeueResult.UNKNOWN:
            recovery.is_revival = True
        elif result in (RequeueResult.HELD, RequeueResult.ENDED):
            self._restore(ticket, recovery)
        else:
            ticket.confirm(recovery.attempt + 1)

    def _restore(self, ticket: Ticket, recovery: Recovery) -> None:
        """Follow the previous attempt again: it still runs, or has completed the job."""
        ticket.restore(recovery)
        for worker, message in recovery.kept:
            self._replay(worker, message)
        if recovery.has_gap and ticket.is_followed:
            self.retry(ticket, "replies_lost")

    async def _revive(self, ticket: Ticket, recovery: Recovery) -> None:
        queue = self._catalogue.queue(ticket.model)
        over = await queue.revive(recovery.job, weight=ticket.weight, attempt=recovery.attempt)
        if ticket.state is ENDED:
            # It was cancelled meanwhile; Redis may have processed that before the revival.
            await self._jobs.drop(ticket)
        elif ticket.recovery is recovery:
            ticket.confirm(over + 1)
        elif over >= ticket.attempt:
            # An earlier try succeeded but its reply was lost; this one fenced off the worker that
            # claimed the job.
            self.retry(ticket, "replies_lost")
