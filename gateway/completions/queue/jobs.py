"""Jobs in flight: all jobs of a gateway process that have not ended, and how they end."""

import asyncio
import logging
from collections.abc import Iterable

from redis.exceptions import RedisError

from common import clock
from common.tasks import in_background
from contract.messages import JobFailed, JobFinished
from contract.outcomes import FailureCode
from gateway.completions.queue.generation import Generation
from gateway.completions.queue.ticket import Ticket
from gateway.models.catalogue import Catalogue

logger = logging.getLogger(__name__)


class JobsInFlight:
    """The tickets of all jobs that are enqueued and have not ended."""

    def __init__(self, catalogue: Catalogue) -> None:
        self.tickets: dict[int, Ticket] = {}
        """By handle."""
        self._catalogue = catalogue
        self._to_drop: dict[int, Ticket] = {}

    def add(self, tickets: Iterable[Ticket]) -> None:
        """Register jobs."""
        self.tickets.update((ticket.job.handle, ticket) for ticket in tickets)

    def end(self, ticket: Ticket, message: JobFinished | JobFailed) -> bool:
        """Deliver the final message of a job. Return False, changing nothing, if it has ended."""
        if self.tickets.pop(ticket.job.handle, None) is None:
            # The end of another job of its request has ended it.
            return False
        if isinstance(message, JobFinished):
            ticket.end("finished")
        else:
            ticket.end(message.code.value, is_failure=True)
        ticket.generation.push(ticket.prompt_index, message)
        return True

    def fail(self, ticket: Ticket, code: FailureCode) -> None:
        """End a job on the gateway's side, whatever its worker does."""
        failed = JobFailed(ticket.job.handle, ticket.attempt, code, "")
        if self.end(ticket, failed) and code is not FailureCode.TAKEN_OVER:
            in_background(self.drop(ticket))

    def withdraw(
        self, generation: Generation, outcome: str, *, is_failure: bool = False
    ) -> list[Ticket]:
        """End the jobs of a request without a message. Return those that were in flight."""
        popped = (self.tickets.pop(job.handle, None) for job in generation.jobs)
        tickets = [ticket for ticket in popped if ticket is not None]
        for ticket in tickets:
            ticket.end(outcome, is_failure=is_failure)
        return tickets

    async def cancel(self, generation: Generation) -> None:
        """Cancel all jobs of the request that are still in flight."""
        tickets = self.withdraw(generation, "cancelled")
        await asyncio.gather(*(self.drop(ticket) for ticket in tickets))

    async def drop(self, ticket: Ticket) -> None:
        """Remove a job from the queue; if Redis is unavailable, once it is back."""
        try:
            await self._catalogue.queue(ticket.model).cancel(ticket.job.id, ticket.job.tenant)
        except RedisError as error:
            logger.warning("cannot remove a job from the queue: %s", type(error).__name__)
            self._to_drop[ticket.job.handle] = ticket

    async def drop_again(self) -> None:
        """Remove the jobs from the queue for which that failed before."""
        tickets, self._to_drop = self._to_drop, {}
        now_ms = clock.now_ms()
        await asyncio.gather(
            *(self.drop(ticket) for ticket in tickets.values() if ticket.job.deadline_ms > now_ms)
        )
