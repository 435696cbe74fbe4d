"""Dispatcher: enqueue jobs, deliver their replies and recover lost jobs.

If a worker dies, another one resumes the job after the last token that the gateway received, so
the client gets every token exactly once.
"""

import asyncio
import itertools
import math
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import msgspec
from redis.asyncio import Redis
from redis.exceptions import RedisError

from common import clock
from common.tasks import in_background, repeat, tolerating_outage
from contract import keys
from contract.messages import Frame, GenerationJob, JobFailed, JobFinished, JobMessage
from contract.outcomes import FailureCode
from contract.queue import JOBS_AT_ONCE, EnqueueReport, EnqueueResult
from contract.tier import ServiceTier
from gateway.completions.queue.generation import Generation
from gateway.completions.queue.jobs import JobsInFlight
from gateway.completions.queue.lost_jobs import LostJobs
from gateway.completions.queue.notices import ResponseNotices, send_notices
from gateway.completions.queue.presence import Presence
from gateway.completions.queue.reader import ReplyReader
from gateway.completions.queue.replies import Replies
from gateway.completions.queue.ticket import RUNNING, Ticket
from gateway.models.catalogue import Catalogue
from gateway.platform import telemetry
from gateway.records.errors import (
    ApiError,
    Availability,
    OverloadedError,
    TenantQueueFullError,
    queue_unavailable,
)

HEARTBEAT_SECONDS = 2.0
RECLAIM_SECONDS = 0.25
CHECK_SECONDS = 1.0
SHORTEST_RETRY_SECONDS: Final = 1.0
LONGEST_RETRY_SECONDS: Final = 60.0
"""OpenAI's client libraries ignore a longer Retry-After."""
UNKNOWN_RETRY_SECONDS: Final = 2.0
"""Retry-After before the throughput of a queue has been measured."""
_FIRST_ATTEMPT: Final = 1


class Adopted(NamedTuple):
    """A job that another gateway began, and the messages received for it."""

    job: GenerationJob
    history: Sequence[JobMessage]
    """Messages of all attempts, in order. A job whose end is among them is not run again."""
    attempt: int
    """The last known attempt, counted from 1."""


@dataclass(eq=False, kw_only=True)
class Dispatcher:
    """All jobs in flight of one gateway process."""

    gateway: str
    client: "Redis"
    catalogue: Catalogue
    max_waiting_jobs: int
    max_waiting_jobs_of_tenant: int
    queue_timeout_seconds: float
    resume_after_seconds: float

    def __post_init__(self) -> None:
        gateway, client, catalogue = self.gateway, self.client, self.catalogue
        self.notices = ResponseNotices()
        self._handles = itertools.count(1)
        self.presence = Presence(gateway, client, resume_after_seconds=self.resume_after_seconds)
        self._jobs = JobsInFlight(catalogue)
        self._replies = Replies(self._jobs, catalogue)
        self.reader = ReplyReader(
            client, keys.replies(gateway), self.presence, self._apply, self._replies.note_gap
        )
        self._lost_jobs = LostJobs(
            client,
            catalogue,
            self.presence,
            self._jobs,
            self._replies.recoveries,
            self.notices,
            self.queue_timeout_seconds,
        )

    @property
    def jobs_in_flight(self) -> int:
        """Number of jobs that are enqueued and neither finished nor cancelled."""
        return len(self._jobs.tickets)

    @property
    def lost_prompts(self) -> int:
        """Number of jobs that workers returned because Redis lacks chunks of their prompts."""
        return self._replies.lost_prompts

    async def trim_replies(self, oldest: bytes) -> None:
        """Remove the entries before `oldest` from this gateway's reply stream. Raises RedisError.

        Another gateway that takes a response over needs those that its journal lacks.
        """
        await self.client.xtrim(keys.replies(self.gateway), minid=oldest.decode())

    def next_handle(self) -> int:
        """Return a handle for a new job, unique within this process."""
        return next(self._handles)

    async def enqueue(
        self, model: str, jobs: Sequence[GenerationJob], *, weight: float, generation: Generation
    ) -> None:
        """Enqueue the jobs of one request, prompt `i` as `jobs[i]`.

        Raises OverloadedError or TenantQueueFullError; then nothing is enqueued. After
        StoreUnavailableError, Redis may have the jobs: the caller cancels them.
        """
        generation.jobs = jobs
        tickets = list[Ticket]()
        for index, job in enumerate(jobs):
            if index and not index % JOBS_AT_ONCE:
                await asyncio.sleep(0)
            ticket = Ticket.of(job, model, index, generation, weight)
            # Do not query Redis about the jobs until they are enqueued.
            ticket.check_at = math.inf
            generation.expect(index, job)
            tickets.append(ticket)
        # Replies may arrive before the enqueue command returns.
        self._jobs.add(tickets)
        try:
            await self.presence.ensure_announced(self.catalogue.executor)
            begun: list[GenerationJob] = []
            for start in range(0, len(tickets), JOBS_AT_ONCE):
                if start:
                    await asyncio.sleep(0)
                some = tickets[start : start + JOBS_AT_ONCE]
                begun += [ticket.spans.begin(ticket.job, ticket.attempt) for ticket in some]
            report = await self.catalogue.queue(model).enqueue(
                begun,
                weight=weight,
                most_waiting=self.max_waiting_jobs,
                most_waiting_of_tenant=self.max_waiting_jobs_of_tenant,
                longest_wait_seconds=self._longest_wait_seconds(jobs),
            )
            if report.shed:
                telemetry.SHED_JOBS.labels(model).inc(len(report.shed))
                in_background(notify_shed(self.client, self.gateway, report))
            require_enqueued(report, model, jobs[0].service_tier, self.max_waiting_jobs_of_tenant)
            for ticket in tickets:
                ticket.check_at = 0.0
        except RedisError:
            # To cancel the jobs here would let the client wait for a Redis that does not respond.
            raise queue_unavailable() from None
        except (OverloadedError, TenantQueueFullError):
            self._jobs.withdraw(generation, "refused", is_failure=True)
            raise

    def _longest_wait_seconds(self, jobs: Sequence[GenerationJob]) -> float:
        """Return how long jobs may wait. Batch jobs wait until their deadline."""
        if jobs[0].service_tier is not ServiceTier.BATCH:
            return self.queue_timeout_seconds
        return max(min(job.deadline_ms for job in jobs) - clock.now_ms(), 0) / 1000

    def adopt(
        self, model: str, adopted: Sequence[Adopted], *, weight: float, generation: Generation
    ) -> None:
        """Resume the jobs of one request that another gateway began, prompt `i` as `adopted[i]`.

        Workers that still run the jobs are fenced off. The jobs resume after their histories, which
        `generation` must have received before. Raises ValueError if a history is inconsistent; then
        nothing is adopted.
        """
        now = time.monotonic()
        tickets: list[Ticket] = []
        for index, each in enumerate(adopted):
            job = msgspec.structs.replace(
                each.job, gateway=self.gateway, handle=self.next_handle(), resumption=None
            )
            ticket = Ticket.of(job, model, index, generation, weight)
            ticket.attempt, ticket.state = each.attempt, RUNNING
            for message in each.history:
                if not ticket.output.replay(message, now):
                    raise ValueError(f"the history of job {job.id} contradicts itself")
            tickets.append(ticket)
        generation.jobs = [ticket.job for ticket in tickets]
        for ticket, each in zip(tickets, adopted, strict=True):
            if not any(isinstance(message, JobFinished | JobFailed) for message in each.history):
                self._jobs.add([ticket])
                self._replies.recoveries.retry(ticket, "adopted")

    async def cancel(self, generation: Generation) -> None:
        """Cancel all jobs of the request that are still in flight."""
        await self._jobs.cancel(generation)

    def fail_all(self, code: FailureCode) -> None:
        """Fail all jobs in flight with this code."""
        for ticket in list(self._jobs.tickets.values()):
            self._jobs.fail(ticket, code)

    def fail_request(self, request_id: str, code: FailureCode) -> bool:
        """Fail the jobs in flight of a request with this code. Return whether there are any."""
        tickets = [
            ticket
            for ticket in self._jobs.tickets.values()
            if ticket.job.id.rpartition("-")[0] == request_id
        ]
        for ticket in tickets:
            self._jobs.fail(ticket, code)
        return bool(tickets)

    def give_up(self, generation: Generation) -> None:
        """Stop following a request that another gateway continues. Its jobs are left unchanged."""
        for job in generation.jobs:
            if (ticket := self._jobs.tickets.get(job.handle)) is not None:
                self._jobs.fail(ticket, FailureCode.TAKEN_OVER)

    async def run(self) -> None:
        """Read replies, send heartbeats and check leases until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self.reader.run())
                tasks.create_task(repeat("send heartbeats", self.beat, seconds=HEARTBEAT_SECONDS))
                tasks.create_task(
                    repeat("reclaim leases", self._lost_jobs.reclaim, seconds=RECLAIM_SECONDS)
                )
                tasks.create_task(
                    repeat("check silent jobs", self._lost_jobs.check_silent, seconds=CHECK_SECONDS)
                )
        finally:
            await self._replies.recoveries.aclose()

    async def beat(self) -> None:
        """Send a heartbeat and detect a restarted or replaced Redis. Raises RedisError."""
        await self.presence.beat()

    async def aclose(self) -> None:
        """Remove this gateway's keys, so that workers stop its remaining jobs at once."""
        await self.presence.deregister()

    def _apply(self, frame: Frame) -> None:
        self._replies.apply(frame)
        for lost in frame.lost:
            self._lost_jobs.lose(lost)
        for handle in frame.taken_over:
            if (ticket := self._jobs.tickets.get(handle)) is not None:
                self._jobs.fail(ticket, FailureCode.TAKEN_OVER)
        self.notices.publish(frame)


def require_enqueued(
    report: EnqueueReport, model: str, tier: ServiceTier, max_of_tenant: int
) -> None:
    """Raise OverloadedError or TenantQueueFullError if a request was rejected.

    The error has a Retry-After, and describes the queue.
    """
    if report.result in (EnqueueResult.ENQUEUED, EnqueueResult.DUPLICATE):
        # A duplicate is our own enqueue, retried because the first reply was lost.
        return
    error: ApiError
    reason, retry_after_seconds = "queue_full", _retry_after_seconds(report)
    match report.result:
        case EnqueueResult.MODEL_FULL:
            error = OverloadedError(
                f"The queue of the model '{model}' is full.",
                retry_after_seconds=retry_after_seconds,
            )
        case EnqueueResult.TENANT_FULL:
            error = TenantQueueFullError(
                "Too many prompts are waiting for this account: "
                f"the limit is {max_of_tenant} for each model.",
                retry_after_seconds=retry_after_seconds,
            )
            reason = error.code
        case EnqueueResult.TOO_LATE:
            error = OverloadedError(
                f"The request would wait too long in the queue of the model '{model}'.",
                retry_after_seconds=retry_after_seconds,
            )
            reason = "wait_too_long"
    error.availability = Availability(
        reason=reason,
        model=model,
        tier=tier,
        position=report.waiting_jobs + 1,
        estimated_wait_seconds=report.retry_after_seconds,
    )
    raise error


async def notify_shed(client: "Redis", sender: str, report: EnqueueReport) -> None:
    """Notify the gateways of the jobs that were shed.

    A gateway that misses the notice finds its job missing and enqueues it again, so it is not lost.
    """
    failed: defaultdict[str, list[JobFailed]] = defaultdict(list)
    retry_after_seconds = _retry_after_seconds(report)
    for gateway, handle in report.shed:
        notice = JobFailed(handle, _FIRST_ATTEMPT, FailureCode.SHED, "", retry_after_seconds)
        failed[gateway].append(notice)
    for gateway, notices in failed.items():
        with tolerating_outage("notify gateways of shed jobs"):
            await send_notices(client, gateway, sender=sender, failed=notices)


def _retry_after_seconds(report: EnqueueReport) -> float:
    known = report.retry_after_seconds
    seconds = UNKNOWN_RETRY_SECONDS if known is None else known
    return min(max(seconds, SHORTEST_RETRY_SECONDS), LONGEST_RETRY_SECONDS)
