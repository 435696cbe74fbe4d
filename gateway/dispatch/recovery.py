"""Recovery: requeue the rest of a job for another worker when an attempt is over.

An attempt is over as soon as its ticket follows the next one. Later messages of it are not applied,
so another worker resumes exactly after the output received until then. Redis decides whether the
attempt is really over. Until Redis replies, messages of the attempt are kept; they are applied if
its worker still holds the job.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping

from redis.exceptions import RedisError

from contract import clock
from contract.outcomes import FailureCode
from contract.queue import RequeueResult
from contract.tasks import end_task, raise_if_cancelled
from gateway.dispatch.catalogue import Catalogue
from gateway.dispatch.ticket import Recovery, Ticket

FIRST_PAUSE_SECONDS = 0.1
LONGEST_PAUSE_SECONDS = 1.0

logger = logging.getLogger(__name__)


class Recoveries:
    """All jobs of a gateway that are being recovered, each at most once at a time."""

    def __init__(
        self,
        catalogue: Catalogue,
        tickets: Mapping[int, Ticket],
        *,
        go_on: Callable[[Ticket, Recovery], None],
        begin_anew: Callable[[Ticket], None],
        fail: Callable[[Ticket, FailureCode], None],
        drop: Callable[[Ticket], Awaitable[None]],
    ) -> None:
        """Create the recoveries of a dispatcher.

        Args:
            catalogue: Provides the queues.
            tickets: Jobs in flight, by handle.
            go_on: Follows an attempt that is not over.
            begin_anew: Revives a job from the output so far.
            fail: Ends a job with a failure code.
            drop: Removes a job from the queue that no client waits for.
        """
        self._catalogue = catalogue
        self._tickets = tickets
        self._go_on = go_on
        self._begin_anew = begin_anew
        self._fail = fail
        self._drop = drop
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, ticket: Ticket, recovery: Recovery) -> None:
        """Recover a job. `ticket.recovery` must be `recovery` until the outcome is known."""
        task = asyncio.create_task(self._run(ticket, recovery))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def aclose(self) -> None:
        """Cancel all recoveries."""
        await asyncio.gather(*(end_task(task) for task in list(self._tasks)))

    async def _run(self, ticket: Ticket, recovery: Recovery) -> None:
        pause = FIRST_PAUSE_SECONDS
        while self._is_open(ticket, recovery):
            try:
                if recovery.is_revival:
                    await self._revive(ticket, recovery)
                else:
                    await self._requeue(ticket, recovery)
            except RedisError as error:
                logger.warning("cannot give a job to another worker now: %s", type(error).__name__)
                raise_if_cancelled()
                if clock.now_ms() > ticket.job.deadline_ms and self._is_open(ticket, recovery):
                    self._fail(ticket, FailureCode.DEADLINE_EXCEEDED)
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
            raise_if_cancelled()

    def _is_open(self, ticket: Ticket, recovery: Recovery) -> bool:
        return ticket.recovery is recovery and self._is_wanted(ticket)

    def _is_wanted(self, ticket: Ticket) -> bool:
        return ticket.job.handle in self._tickets

    async def _requeue(self, ticket: Ticket, recovery: Recovery) -> None:
        queue = self._catalogue.queue(ticket.model)
        result = await queue.requeue(
            recovery.job, recovery.attempt, is_returned=recovery.is_returned
        )
        if not self._is_open(ticket, recovery):
            return
        if result is RequeueResult.UNKNOWN:
            recovery.is_revival = True
        elif result in (RequeueResult.HELD, RequeueResult.ENDED):
            self._go_on(ticket, recovery)
        else:
            ticket.recovery = None
            ticket.losses = recovery.losses

    async def _revive(self, ticket: Ticket, recovery: Recovery) -> None:
        queue = self._catalogue.queue(ticket.model)
        over = await queue.revive(recovery.job, weight=ticket.weight, attempt=recovery.attempt)
        if not self._is_wanted(ticket):
            # It was cancelled meanwhile; Redis may have processed that before the revival.
            await self._drop(ticket)
        elif self._is_open(ticket, recovery):
            ticket.attempt = max(ticket.attempt, over + 1)
            ticket.recovery = None
            ticket.losses = recovery.losses
        elif over >= ticket.attempt:
            # An earlier try succeeded but its reply was lost; this one fenced off the worker that
            # claimed the job.
            self._begin_anew(ticket)
