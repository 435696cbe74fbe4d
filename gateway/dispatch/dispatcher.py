"""Dispatcher: enqueue jobs, deliver their replies and recover lost jobs.

Only the dispatcher knows which jobs are in flight. It matches a reply to its job by the handle that
the job was enqueued with. If a worker dies, another one resumes the job after the last token that
the gateway received, so the client gets every token exactly once.
"""

import asyncio
import itertools
import logging
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

import msgspec
from redis.asyncio import Redis
from redis.exceptions import RedisError

from contract import clock, keys, messages
from contract.logs import about
from contract.messages import (
    CancelResponse,
    Delta,
    Follow,
    Frame,
    GenerationJob,
    JobFailed,
    JobFinished,
    JobLost,
    JobReturned,
    ResponseGrown,
    ReturnReason,
)
from contract.outcomes import FailureCode
from contract.queue import JOBS_AT_ONCE, LostJob
from contract.tasks import in_background, raise_if_cancelled
from gateway import telemetry
from gateway.dispatch.catalogue import Catalogue
from gateway.dispatch.generation import Generation, JobMessage
from gateway.dispatch.overload import require_enqueued, tell_shed
from gateway.dispatch.reader import ReplyReader
from gateway.dispatch.recovery import Recoveries
from gateway.dispatch.ticket import Recovery, Ticket
from gateway.errors import OverloadedError, TenantQueueFullError, queue_unavailable

MOST_LOSSES = 5
"""Consecutive attempts that may be lost without a token before the job fails."""
MOST_STRIKES = 2
"""Engines that may die while running a job before it fails: the second death blames the job."""
MOST_REVIVALS = 5
"""Times that a job may be enqueued anew without a token in between."""
MOST_UNHEARD_ENDS = 2

ALIVE_SECONDS = 6
HEARTBEAT_SECONDS = 2.0
RECLAIM_SECONDS = 0.5
SILENCE_SECONDS = 5.0
"""Redis is queried about a job after this long without a reply, and again after each interval."""
UNSERVED_SECONDS = 15.0
"""A job that no worker has begun fails after its model had no worker for this long.

Announcements expire after five seconds. A worker that was disconnected, stopped or restarted
needs a few more seconds to announce its model again.
"""
CHECK_SECONDS = 1.0

logger = logging.getLogger(__name__)


class Adopted(NamedTuple):
    """A job that another gateway began, and the messages received for it."""

    job: GenerationJob
    history: Sequence[JobMessage]
    """Messages of all attempts, in order. A job whose end is among them is not run again."""
    attempt: int
    """The last known attempt, counted from 1."""


class Dispatcher:
    """All jobs in flight of one gateway process."""

    def __init__(
        self,
        *,
        gateway: str,
        client: "Redis",
        catalogue: Catalogue,
        max_waiting_jobs: int,
        max_waiting_jobs_of_tenant: int,
        queue_timeout_seconds: float,
        resume_after_seconds: float,
    ) -> None:
        self.gateway = gateway
        self.on_follow: Callable[[Follow], None] | None = None
        """Called when another gateway follows an answer. None of the four callbacks may raise."""
        self.on_grown: Callable[[ResponseGrown], None] | None = None
        """Called when an answer of another gateway that is followed here has grown."""
        self.on_cancel: Callable[[CancelResponse], None] | None = None
        """Called when another gateway cancels an answer."""
        self.on_orphan: Callable[[str, LostJob], Awaitable[bool]] | None = None
        """Called with the model and a lost job of a dead gateway; returns whether it handles it."""
        self._client = client
        self._catalogue = catalogue
        self._max_waiting_jobs = max_waiting_jobs
        self._max_waiting_jobs_of_tenant = max_waiting_jobs_of_tenant
        self._queue_timeout_seconds = queue_timeout_seconds
        self._resume_after_seconds = resume_after_seconds
        self._handles = itertools.count(1)
        self._tickets: dict[int, Ticket] = {}
        self._to_drop: dict[int, Ticket] = {}
        self._run_id = ""
        self._began_at = time.monotonic()
        self._steady_since = float("-inf")
        self._is_announced = False
        self._reader = ReplyReader(
            client,
            keys.replies(gateway),
            on_frame=self._apply,
            on_gap=self._note_gap,
            on_failure=self._note_outage,
        )
        self._recoveries = Recoveries(
            catalogue,
            self._tickets,
            go_on=self._go_on,
            begin_anew=lambda ticket: self._revive(ticket, "replies_lost"),
            fail=self._fail,
            drop=self._drop,
        )

    @property
    def jobs_in_flight(self) -> int:
        """Number of jobs that are enqueued and neither finished nor cancelled."""
        return len(self._tickets)

    @property
    def last_entry(self) -> bytes:
        """The last entry of this gateway's reply stream whose messages were delivered."""
        return self._reader.last_entry

    @property
    def is_steady(self) -> bool:
        """Whether Redis has been up long enough for every live process to have announced itself."""
        return time.monotonic() - self._steady_since >= self._resume_after_seconds

    def next_handle(self) -> int:
        """Return a handle for a new job, unique within this process."""
        return next(self._handles)

    async def enqueue(
        self, model: str, jobs: Sequence[GenerationJob], *, weight: float, generation: Generation
    ) -> None:
        """Enqueue the jobs of one request, prompt `i` as `jobs[i]`.

        Raises OverloadedError, TenantQueueFullError or StoreUnavailableError; then nothing is enqueued.
        """
        # `check_at` is infinite until the jobs are enqueued: do not query Redis about them yet.
        tickets = [
            Ticket(job, model, index, generation, weight, check_at=math.inf)
            for index, job in enumerate(jobs)
        ]
        generation.jobs = jobs
        for ticket in tickets:
            generation.expect(ticket.prompt_index, ticket.job)
        # Replies may arrive before the enqueue command returns.
        self._tickets.update((ticket.job.handle, ticket) for ticket in tickets)
        try:
            begun: list[GenerationJob] = []
            for start in range(0, len(tickets), JOBS_AT_ONCE):
                if start:
                    await asyncio.sleep(0)
                some = tickets[start : start + JOBS_AT_ONCE]
                begun += [ticket.attempts.begin(ticket.job, ticket.attempt) for ticket in some]
            report = await self._catalogue.queue(model).enqueue(
                begun,
                weight=weight,
                most_waiting=self._max_waiting_jobs,
                most_waiting_of_tenant=self._max_waiting_jobs_of_tenant,
                longest_wait_seconds=self._queue_timeout_seconds,
            )
            if report.shed:
                telemetry.SHED_JOBS.labels(model).inc(len(report.shed))
                in_background(tell_shed(self._client, self.gateway, report))
            require_enqueued(report, model, self._max_waiting_jobs_of_tenant)
            for ticket in tickets:
                ticket.check_at = 0.0
        except RedisError:
            # Redis may or may not have taken the jobs, so cancel them.
            await self.cancel(generation)
            raise queue_unavailable() from None
        except (OverloadedError, TenantQueueFullError):
            for ticket in tickets:
                self._tickets.pop(ticket.job.handle, None)
                ticket.attempts.end("refused", is_failure=True)
            raise

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
            ticket = Ticket(job, model, index, generation, weight, attempt=each.attempt)
            for message in each.history:
                if not ticket.receive(message, now):
                    raise ValueError(f"the history of job {job.id} contradicts itself")
            tickets.append(ticket)
        generation.jobs = [ticket.job for ticket in tickets]
        for ticket, each in zip(tickets, adopted, strict=True):
            if not any(isinstance(message, JobFinished | JobFailed) for message in each.history):
                ticket.has_begun = True
                self._tickets[ticket.job.handle] = ticket
                self._revive(ticket, "adopted")

    async def cancel(self, generation: Generation) -> None:
        """Cancel all jobs of the request that are still in flight."""
        popped = (self._tickets.pop(job.handle, None) for job in generation.jobs)
        tickets = [ticket for ticket in popped if ticket is not None]
        for ticket in tickets:
            ticket.attempts.end("cancelled")
        await asyncio.gather(*(self._drop(ticket) for ticket in tickets))

    def fail_all(self, code: FailureCode) -> None:
        """Fail all jobs in flight with this code."""
        for ticket in list(self._tickets.values()):
            self._fail(ticket, code)

    def give_up(self, generation: Generation) -> None:
        """Stop following a request that another gateway continues. Its jobs are left unchanged."""
        for job in generation.jobs:
            if (ticket := self._tickets.get(job.handle)) is not None:
                self._fail(ticket, FailureCode.TAKEN_OVER)

    # -- loops -----------------------------------------------------------------------------------

    async def run(self) -> None:
        """Read replies, send heartbeats and check leases until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._reader.run())
                tasks.create_task(self._repeat(self.beat, HEARTBEAT_SECONDS))
                tasks.create_task(self._repeat(self._reclaim, RECLAIM_SECONDS))
                tasks.create_task(self._repeat(self._check_silent_jobs, CHECK_SECONDS))
        finally:
            await self._recoveries.aclose()

    async def aclose(self) -> None:
        """Remove this gateway's keys, so that workers stop its remaining jobs at once."""
        try:
            await self._client.delete(keys.gateway_alive(self.gateway), keys.replies(self.gateway))
        except RedisError as error:
            logger.warning("cannot say goodbye to Redis: %s", type(error).__name__)

    @staticmethod
    async def _repeat(step: Callable[[], Awaitable[None]], seconds: float) -> None:
        while True:
            try:
                await step()
            except RedisError as error:
                logger.warning("Redis failed us: %s", type(error).__name__)
            raise_if_cancelled()
            await asyncio.sleep(seconds)

    async def beat(self) -> None:
        """Send a heartbeat and detect a restarted or replaced Redis. Raises RedisError."""
        pipeline = self._announcement(self._client)
        pipeline.execute_command("INFO", "server")
        *_, server = await pipeline.execute()
        run_id = str(server["run_id"])
        if self._run_id and run_id != self._run_id:
            self._reader.doubt()
            self._note_outage()
        self._run_id = run_id
        self._is_announced = True

    async def announce(self, client: "Redis") -> None:
        """Send a heartbeat.

        May be called in another event loop, with a client of that loop. Raises RedisError.
        """
        await self._announcement(client).execute()

    def _announcement(self, client: "Redis") -> Any:
        pipeline = client.pipeline(transaction=False)
        pipeline.execute_command("SET", keys.gateway_alive(self.gateway), 1, "EX", ALIVE_SECONDS)
        pipeline.execute_command("EXPIRE", keys.replies(self.gateway), ALIVE_SECONDS * 10)
        return pipeline

    def _note_outage(self) -> None:
        """Give workers time to report the jobs they hold before any job counts as lost."""
        self._steady_since = time.monotonic()
        self._is_announced = False

    def may_judge_others(self) -> bool:
        """Whether other gateways had time to announce themselves to a restarted Redis."""
        return time.monotonic() - self._began_at >= self._resume_after_seconds

    # -- replies ---------------------------------------------------------------------------------

    def _apply(self, frame: Frame) -> None:
        now = time.monotonic()
        worker = frame.worker
        for started in frame.started:
            self._hear(worker, started, now)
        for scored in frame.prompts:
            self._hear(worker, scored, now)
        for delta in frame.deltas:
            self._hear_delta(worker, delta, now)
        for finished in frame.finished:
            self._hear(worker, finished, now)
        for failed in frame.failed:
            if failed.code is FailureCode.SHED:
                self._shed(failed)
            else:
                self._hear(worker, failed, now)
        for returned in frame.returned:
            self._take_back(worker, returned, now)
        for lost in frame.lost:
            self._lose(lost)
        self._apply_notices(frame)

    def _apply_notices(self, frame: Frame) -> None:
        if self.on_follow is not None:
            for follow in frame.follows:
                self.on_follow(follow)
        if self.on_grown is not None:
            for grown in frame.grown:
                self.on_grown(grown)
        if self.on_cancel is not None:
            for cancel in frame.cancels:
                self.on_cancel(cancel)

    def _hear_delta(self, worker: str, delta: Delta, now: float) -> None:
        """Process a delta. Like `_hear`, but on the hot path: it runs for every token."""
        ticket = self._tickets.get(delta.handle)
        if ticket is None:
            return
        if (
            delta.attempt != ticket.attempt or worker != ticket.worker
        ) and not self._is_to_be_heard(ticket, worker, delta):
            return
        ticket.heard_at = now
        if not ticket.receive_delta(delta, now):
            self._disbelieve(ticket, worker)
            return
        if ticket.paused_at is not None and ticket.has_progressed:
            telemetry.RESUMPTION_PAUSE.observe(now - ticket.paused_at, ticket.attempts.exemplar())
            ticket.paused_at = None
        if delta.token_ids:
            ticket.note_latency(delta.choice, len(delta.token_ids), now)
        if not ticket.generation.push(ticket.prompt_index, delta):
            in_background(self.cancel(ticket.generation))

    def _hear(self, worker: str, message: JobMessage, now: float) -> None:
        ticket = self._tickets.get(message.handle)
        if ticket is None:
            return
        if (
            message.attempt != ticket.attempt or worker != ticket.worker
        ) and not self._is_to_be_heard(ticket, worker, message):
            return
        ticket.heard_at = now
        if ticket.is_known(message):
            return
        if not ticket.receive(message, now):
            self._disbelieve(ticket, worker)
            return
        if isinstance(message, JobFinished):
            message = ticket.as_it_took(message, now)
        if isinstance(message, JobFinished | JobFailed):
            del self._tickets[message.handle]
            _end_attempt(ticket, message)
        if not ticket.generation.push(ticket.prompt_index, message):
            in_background(self.cancel(ticket.generation))

    def _disbelieve(self, ticket: Ticket, worker: str) -> None:
        logger.error(
            "what worker %s tells of job %s does not fit",
            worker,
            ticket.job.id,
            extra=about(ticket.job),
        )
        self._revive(ticket, "replies_lost")

    def _is_to_be_heard(
        self, ticket: Ticket, worker: str, message: JobMessage | JobReturned
    ) -> bool:
        """Whether a message counts although its worker or attempt is not the ticket's."""
        recovery = ticket.recovery
        if message.attempt < ticket.attempt:
            if (
                recovery is not None
                and not recovery.is_revival
                and message.attempt == recovery.attempt
                and recovery.worker in (None, worker)
            ):
                recovery.worker = worker
                recovery.keep(worker, message)
            else:
                telemetry.FENCED_MESSAGES.inc()
            return False
        if message.attempt > ticket.attempt:
            # Only this gateway requeues the job: the reply to that requeue is lost or on its way.
            ticket.begin_attempt(message.attempt)
        if recovery is not None:
            ticket.losses = recovery.losses
            ticket.recovery = None
        if ticket.worker is None and worker not in ticket.gaps:
            ticket.worker = worker
        elif ticket.worker != worker:
            # The first frame of the attempt is lost, or Redis lost a claim and gave another worker
            # a claim with the same number.
            self._revive(ticket, "replies_lost")
            return False
        return True

    def _shed(self, failed: JobFailed) -> None:
        """End a job that was shed from the queue before a worker claimed it."""
        ticket = self._tickets.get(failed.handle)
        if ticket is not None and ticket.worker is None and ticket.attempt == failed.attempt:
            self._end(ticket, failed)

    def _note_gap(self, worker: str) -> None:
        """Revive all jobs of which a message may have been in a lost frame."""
        for ticket in list(self._tickets.values()):
            if ticket.worker == worker:
                self._revive(ticket, "replies_lost")
            elif ticket.worker is None:
                ticket.gaps |= {worker}
            if ticket.recovery is not None and ticket.recovery.worker in (None, worker):
                ticket.recovery.has_gap = True

    # -- lost jobs -------------------------------------------------------------------------------

    def _take_back(self, worker: str, returned: JobReturned, now: float) -> None:
        """Requeue a job that its worker cannot finish."""
        ticket = self._tickets.get(returned.handle)
        if ticket is None:
            return
        is_expected = returned.attempt == ticket.attempt and worker == ticket.worker
        if not is_expected and not self._is_to_be_heard(ticket, worker, returned):
            return
        ticket.heard_at = now
        if returned.reason is ReturnReason.ENGINE_DIED:
            ticket.strikes = 1 if returned.has_progressed else ticket.strikes + 1
            if ticket.strikes >= MOST_STRIKES:
                self._fail(ticket, FailureCode.POISONOUS)
                return
        self._recover(ticket, returned.reason.value, is_returned=True)

    def _lose(self, lost: JobLost) -> None:
        """Requeue a job whose lease has expired."""
        ticket = self._tickets.get(lost.handle)
        if ticket is None:
            in_background(self._drop_unfollowed(lost))
            return
        if ticket.recovery is not None or lost.attempt < ticket.attempt:
            return
        if lost.attempt > ticket.attempt:
            # The reply to our requeue was lost.
            ticket.begin_attempt(lost.attempt)
        losses = 0 if ticket.has_progressed else ticket.losses + 1
        if losses >= MOST_LOSSES:
            self._fail(ticket, FailureCode.WORKER_LOST)
        else:
            self._recover(ticket, "lease_expired", losses=losses)

    def _revive(self, ticket: Ticket, reason: telemetry.LossReason) -> None:
        """Enqueue a job anew after the output received so far, whatever Redis stores about it."""
        ticket.revivals += 1
        if ticket.revivals > MOST_REVIVALS:
            self._fail(ticket, FailureCode.REPLIES_LOST)
        else:
            self._recover(ticket, reason, is_revival=True)

    def _recover(
        self,
        ticket: Ticket,
        reason: telemetry.LossReason,
        *,
        losses: int | None = None,
        is_returned: bool = False,
        is_revival: bool = False,
    ) -> None:
        now = time.monotonic()
        ticket.has_begun = ticket.has_begun or not is_revival or ticket.worker is not None
        if ticket.has_begun:
            ticket.waits_since = now
            ticket.paused_at = ticket.paused_at or ticket.heard_at
        ticket.unheard_ends = 0
        if losses is None:
            losses = 0 if ticket.has_progressed else ticket.losses
        recovery = Recovery(
            ticket.attempt,
            ticket.worker,
            self._next_attempt(ticket, reason, is_suspect=bool(ticket.strikes or losses)),
            ticket.has_progressed,
            losses,
            is_returned=is_returned,
            is_revival=is_revival,
            has_gap=bool(ticket.gaps),
        )
        # From here on, messages of that attempt are not applied: only the output so far counts.
        ticket.begin_attempt(recovery.attempt + 1)
        ticket.recovery = recovery
        telemetry.attempt_over(reason)
        logger.info(
            "attempt %d of job %s is over: %s",
            recovery.attempt,
            ticket.job.id,
            reason,
            extra=about(recovery.job),
        )
        self._recoveries.start(ticket, recovery)

    @staticmethod
    def _next_attempt(ticket: Ticket, reason: str, *, is_suspect: bool) -> GenerationJob:
        """Return the job for the next attempt, and begin that attempt's span."""
        ticket.attempts.end(reason, is_failure=True)
        return ticket.attempts.begin(ticket.rest(is_suspect=is_suspect), ticket.attempt + 1)

    def _go_on(self, ticket: Ticket, recovery: Recovery) -> None:
        """Follow the previous attempt again: it still runs, or has ended."""
        # The span of that attempt ended when it was presumed lost, and records that.
        ticket.attempts.end("not_needed")
        ticket.recovery = None
        ticket.begin_attempt(recovery.attempt)
        ticket.worker = recovery.worker
        ticket.has_progressed = recovery.has_progressed
        ticket.heard_at = now = time.monotonic()
        for worker, message in recovery.kept:
            if isinstance(message, JobReturned):
                self._take_back(worker, message, now)
            elif isinstance(message, Delta):
                self._hear_delta(worker, message, now)
            else:
                self._hear(worker, message, now)
        if recovery.has_gap and self._is_followed(ticket):
            self._revive(ticket, "replies_lost")

    def _is_followed(self, ticket: Ticket) -> bool:
        """Whether a job is in flight and not being recovered."""
        return ticket.recovery is None and ticket.job.handle in self._tickets

    def _fail(self, ticket: Ticket, code: FailureCode) -> None:
        """End a job on the gateway's side, whatever its worker does."""
        self._end(ticket, JobFailed(ticket.job.handle, ticket.attempt, code, ""))
        if code is not FailureCode.TAKEN_OVER:
            in_background(self._drop(ticket))

    def _end(self, ticket: Ticket, failed: JobFailed) -> None:
        del self._tickets[ticket.job.handle]
        _end_attempt(ticket, failed)
        ticket.generation.push(ticket.prompt_index, failed)

    async def _drop(self, ticket: Ticket) -> None:
        """Remove a job from the queue; if Redis is unavailable, once it is back."""
        try:
            await self._catalogue.queue(ticket.model).cancel(ticket.job.id, ticket.job.tenant)
        except RedisError as error:
            logger.warning("cannot cancel a job now: %s", type(error).__name__)
            self._to_drop[ticket.job.handle] = ticket

    async def _drop_unfollowed(self, lost: JobLost) -> None:
        """Remove a job of ours that is no longer in flight, unless another gateway took it over.

        If Redis is unavailable, the loss is reported again later.
        """
        try:
            owner: Any = await self._client.hget(keys.job(lost.model, lost.job_id), "gateway")
            if owner == self.gateway.encode():
                await self._catalogue.queue(lost.model).cancel(lost.job_id, lost.tenant)
        except RedisError as error:
            logger.warning("cannot cancel a job now: %s", type(error).__name__)

    async def _drop_again(self) -> None:
        tickets, self._to_drop = self._to_drop, {}
        now_ms = clock.now_ms()
        await asyncio.gather(
            *(self._drop(ticket) for ticket in tickets.values() if ticket.job.deadline_ms > now_ms)
        )

    async def _reclaim(self) -> None:
        if not self.is_steady:
            return
        for model in self._catalogue.models:
            queue = self._catalogue.queue(model.card.model)
            for lost in await queue.reclaim():
                await self._report_lost(model.card.model, lost)

    async def _report_lost(self, model: str, lost: LostJob) -> None:
        notice = JobLost(lost.handle, lost.attempt, model, lost.job_id, lost.tenant)
        is_ours = lost.gateway == self.gateway
        if is_ours and lost.handle in self._tickets:
            self._lose(notice)
        elif not is_ours and await self._client.exists(keys.gateway_alive(lost.gateway)):
            frame = messages.encode(Frame(self.gateway, 0, lost=[notice]))
            await self._client.xadd(keys.replies(lost.gateway), {"f": frame})
        elif not is_ours and not self.may_judge_others():
            return
        elif is_ours or self.on_orphan is None or not await self.on_orphan(model, lost):
            # No client waits for it: its gateway is gone or has cancelled it.
            await self._catalogue.queue(model).cancel(lost.job_id, lost.tenant)

    async def _check_silent_jobs(self) -> None:
        """Query Redis about jobs without recent replies.

        Such a job may have waited too long for a worker, been lost by Redis or been taken over by
        another gateway. It may also have ended, with the reply lost.
        """
        if not self.is_steady:
            return
        if not self._is_announced:
            # Workers drop jobs of a gateway that has no heartbeat in an emptied Redis.
            await self.beat()
        await self._drop_again()
        now = time.monotonic()
        silent = [
            t
            for t in self._tickets.values()
            if t.recovery is None and max(t.check_at, t.heard_at + SILENCE_SECONDS) < now
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
            if ticket.heard_at <= now and self._is_followed(ticket):
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
            self._revive(ticket, "forgotten")
        elif gateway is not None and gateway.decode() != self.gateway:
            self._fail(ticket, FailureCode.TAKEN_OVER)
        elif ended is not None:
            ticket.unheard_ends += 1
            if ticket.unheard_ends >= MOST_UNHEARD_ENDS:
                self._revive(ticket, "replies_lost")
        elif int(attempt or 0) + (worker == b"") < ticket.attempt:
            # A Redis failover lost the requeue of this job.
            self._revive(ticket, "forgotten")
        elif worker == b"":
            self._judge_waiting(ticket, now)

    def _judge_waiting(self, ticket: Ticket, now: float) -> None:
        is_overdue = now - ticket.waits_since > self._queue_timeout_seconds
        if ticket.has_begun:
            if is_overdue:
                self._fail(ticket, FailureCode.WORKER_LOST)
        elif is_overdue:
            self._fail(ticket, FailureCode.QUEUE_TIMEOUT)
        elif self._catalogue.unserved_seconds(ticket.model) > UNSERVED_SECONDS:
            self._fail(ticket, FailureCode.NO_WORKER)


def _end_attempt(ticket: Ticket, end: JobFinished | JobFailed) -> None:
    if isinstance(end, JobFinished):
        ticket.attempts.end("finished")
    else:
        ticket.attempts.end(end.code.value, is_failure=True)
