"""Enqueue the jobs of a request, hand its replies over, and deal with what gets lost.

The dispatcher is the only part that knows which jobs are in flight. It reads one Redis stream for the
whole process; a reply finds its job by the handle that the job was enqueued with.
"""

import asyncio
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any

import msgspec
from redis.asyncio import Redis
from redis.exceptions import RedisError

from contract import keys, messages
from contract.messages import Frame, GenerationJob, JobFailed, JobFinished, JobLost
from contract.outcomes import FailureCode
from contract.queue import LostJob, RequeueResult
from gateway.dispatch.catalogue import Catalogue
from gateway.dispatch.generation import Generation, Message, Ticket
from gateway.dispatch.overload import require_enqueued, tell_shed
from gateway.errors import queue_unavailable
from gateway.tasks import raise_if_cancelled
from gateway.telemetry import SHED_JOBS

MAX_ATTEMPTS = 3
"""Claims of one job before it is given up: whatever kills three workers is the job's own doing."""

READ_BLOCK_MS = 1_000
READ_ENTRIES = 256
ALIVE_SECONDS = 6
HEARTBEAT_SECONDS = 2.0
RECLAIM_SECONDS = 1.0
SILENCE_SECONDS = 5.0
"""How long a job may be silent before Redis is asked about it, and how often it is asked again."""
CHECK_SECONDS = 1.0

logger = logging.getLogger(__name__)


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
    ) -> None:
        self.gateway = gateway
        self._client = client
        self._catalogue = catalogue
        self._max_waiting_jobs = max_waiting_jobs
        self._max_waiting_jobs_of_tenant = max_waiting_jobs_of_tenant
        self._queue_timeout_seconds = queue_timeout_seconds
        self._handles = itertools.count(1)
        self._tickets: dict[int, Ticket] = {}
        self._frame_numbers: dict[str, int] = {}
        self._last_entry: bytes | str = "0-0"

    @property
    def jobs_in_flight(self) -> int:
        """Jobs enqueued and neither finished nor taken back."""
        return len(self._tickets)

    def next_handle(self) -> int:
        """Return a number for a new job, unique within this process."""
        return next(self._handles)

    async def enqueue(
        self, model: str, jobs: Sequence[GenerationJob], *, weight: float, generation: Generation
    ) -> None:
        """Put the jobs of one request on the queue, prompt `i` as `jobs[i]`.

        Raises OverloadedError, TenantQueueFullError or StoreUnavailableError; then nothing is enqueued.
        """
        tickets = [Ticket(job, model, i, generation) for i, job in enumerate(jobs)]
        generation.tickets = tickets
        # Replies may come before the enqueue's own answer.
        self._tickets.update((ticket.job.handle, ticket) for ticket in tickets)
        try:
            report = await self._catalogue.queue(model).enqueue(
                jobs,
                weight=weight,
                most_waiting=self._max_waiting_jobs,
                most_waiting_of_tenant=self._max_waiting_jobs_of_tenant,
                longest_wait_seconds=self._queue_timeout_seconds,
            )
            if report.shed:
                SHED_JOBS.labels(model).inc(len(report.shed))
                _in_background(tell_shed(self._client, self.gateway, report))
            require_enqueued(report, model, self._max_waiting_jobs_of_tenant)
        except RedisError:
            # It is not known whether Redis took the jobs, so they are taken back as well.
            await self.cancel(generation)
            raise queue_unavailable() from None
        except BaseException:
            self._forget(tickets)
            raise

    async def cancel(self, generation: Generation) -> None:
        """Take back whatever of the request is still in flight."""
        tickets = [t for t in generation.tickets if self._tickets.pop(t.job.handle, None)]
        await asyncio.gather(*(self._drop(ticket) for ticket in tickets))

    def fail_all(self, code: FailureCode) -> None:
        """End everything that is in flight, and tell whoever waits for it why."""
        for ticket in list(self._tickets.values()):
            self._fail(ticket, code)

    # -- loops -----------------------------------------------------------------------------------

    async def run(self) -> None:
        """Read replies and look after leases until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._read_replies())
            tasks.create_task(self._repeat(self.beat, HEARTBEAT_SECONDS))
            tasks.create_task(self._repeat(self._reclaim, RECLAIM_SECONDS))
            tasks.create_task(self._repeat(self._check_silent_jobs, CHECK_SECONDS))

    async def aclose(self) -> None:
        """Say that this gateway is gone, so that workers stop at once what is left."""
        try:
            await self._client.delete(keys.gateway_alive(self.gateway), keys.replies(self.gateway))
        except RedisError as error:
            logger.warning("cannot say goodbye to Redis: %s", type(error).__name__)

    async def _read_replies(self) -> None:
        stream = keys.replies(self.gateway)
        while True:
            try:
                reply = await self._client.xread(
                    {stream: self._last_entry}, count=READ_ENTRIES, block=READ_BLOCK_MS
                )
            except RedisError as error:
                logger.warning("cannot read replies: %s", type(error).__name__)
                raise_if_cancelled()
                await asyncio.sleep(0.2)
                continue
            raise_if_cancelled()
            for entry_id, fields in _entries(reply):
                self._last_entry = entry_id
                try:
                    frame = messages.decode_frame(fields[b"f"])
                except (msgspec.MsgspecError, KeyError):
                    # The worker's next frame shows the gap, and the jobs concerned fail then.
                    logger.exception("a reply frame cannot be read")
                    continue
                self._apply(frame)
                # Requests take their replies in between, even after a long outage.
                await asyncio.sleep(0)

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
        """Say that this gateway lives. Raises RedisError."""
        pipeline = self._client.pipeline(transaction=False)
        pipeline.execute_command("SET", keys.gateway_alive(self.gateway), 1, "EX", ALIVE_SECONDS)
        pipeline.execute_command("EXPIRE", keys.replies(self.gateway), ALIVE_SECONDS * 10)
        await pipeline.execute()

    # -- replies ---------------------------------------------------------------------------------

    def _apply(self, frame: Frame) -> None:
        if frame.number and not self._is_next(frame):
            return
        now = time.monotonic()
        for scored in frame.prompts:
            self._hand_over(frame.worker, scored, now)
        for delta in frame.deltas:
            self._hand_over(frame.worker, delta, now)
        for finished in frame.finished:
            self._end(frame.worker, finished, now)
        for failed in frame.failed:
            self._end(frame.worker, failed, now)
        for lost in frame.lost:
            self._lose(lost)

    def _is_next(self, frame: Frame) -> bool:
        expected = self._frame_numbers.get(frame.worker, 0) + 1
        if frame.number == 1 and expected > 2:
            expected = 1  # The worker had given us up for dead and starts again.
        if frame.number < expected:
            return False  # Written twice by a worker that did not hear the first time.
        self._frame_numbers[frame.worker] = frame.number
        if frame.number > expected:
            logger.error(
                "frames %d to %d of worker %s are lost", expected, frame.number - 1, frame.worker
            )
            for ticket in list(self._tickets.values()):
                if ticket.worker == frame.worker:
                    self._fail(ticket, FailureCode.REPLIES_LOST)
                elif ticket.worker is None:
                    ticket.gaps |= {frame.worker}
        return True

    def _hand_over(self, worker: str, message: Message, now: float) -> None:
        ticket = self._current(worker, message)
        if ticket is None:
            return
        ticket.worker = worker
        ticket.heard_at = now
        if not ticket.generation.push(ticket.prompt_index, message):
            _in_background(self.cancel(ticket.generation))

    def _end(self, worker: str, message: JobFinished | JobFailed, now: float) -> None:
        if self._current(worker, message) is not None:
            self._hand_over(worker, message, now)
            self._tickets.pop(message.handle, None)

    def _current(self, worker: str, message: Message) -> Ticket | None:
        """Return the job that a reply is about, or None if the reply is of no use."""
        ticket, attempt = self._tickets.get(message.handle), message.attempt
        if ticket is None or attempt < ticket.attempt:
            return None
        if attempt > ticket.attempt:
            if ticket.worker is not None:
                # What was sent to the client came from an attempt that is not the one that goes on.
                self._fail(ticket, FailureCode.WORKER_LOST)
                return None
            ticket.begin_attempt(attempt)
        if ticket.worker is None and worker in ticket.gaps:
            # Its beginning may have been in the frames that never came.
            self._fail(ticket, FailureCode.REPLIES_LOST)
            return None
        return ticket

    # -- what gets lost --------------------------------------------------------------------------

    def _lose(self, lost: JobLost) -> None:
        ticket = self._tickets.get(lost.handle)
        if ticket is None or lost.attempt < ticket.attempt:
            return
        # It may be a later attempt than we know of, if the answer to our requeueing got lost.
        if ticket.worker is not None or lost.attempt >= MAX_ATTEMPTS:
            self._fail(ticket, FailureCode.WORKER_LOST)
            return
        # Nothing was heard of the job, so it can be run again unnoticed.
        _in_background(self._requeue(ticket, lost.attempt))

    async def _requeue(self, ticket: Ticket, lost_attempt: int) -> None:
        queue = self._catalogue.queue(ticket.model)
        try:
            requeued = await queue.requeue(ticket.job, lost_attempt)
        except RedisError as error:
            # It will be reported again.
            logger.warning("cannot requeue a job now: %s", type(error).__name__)
            return
        if requeued is not RequeueResult.REQUEUED or ticket.attempt > lost_attempt:
            return
        if ticket.worker is None:
            ticket.begin_attempt(lost_attempt + 1)
        elif ticket.job.handle in self._tickets:
            # The lost worker was heard of while the job was being given to another one.
            self._fail(ticket, FailureCode.WORKER_LOST)

    def _fail(self, ticket: Ticket, code: FailureCode) -> None:
        """End a job on this side, whatever its worker does."""
        del self._tickets[ticket.job.handle]
        failed = JobFailed(ticket.job.handle, ticket.attempt, code, "")
        ticket.generation.push(ticket.prompt_index, failed)
        _in_background(self._drop(ticket))

    async def _drop(self, ticket: Ticket) -> None:
        try:
            await self._catalogue.queue(ticket.model).cancel(ticket.job.id, ticket.job.tenant)
        except RedisError as error:
            # Its lease will be reported to us, find no ticket and be cancelled then.
            logger.warning("cannot cancel a job now: %s", type(error).__name__)

    async def _reclaim(self) -> None:
        for model in self._catalogue.models:
            queue = self._catalogue.queue(model.card.model)
            for lost in await queue.reclaim():
                await self._report_lost(model.card.model, lost)

    async def _report_lost(self, model: str, lost: LostJob) -> None:
        notice = JobLost(lost.handle, lost.attempt)
        if lost.gateway == self.gateway and lost.handle in self._tickets:
            self._lose(notice)
        elif lost.gateway != self.gateway and await self._client.exists(
            keys.gateway_alive(lost.gateway)
        ):
            frame = messages.encode(Frame(self.gateway, 0, lost=[notice]))
            await self._client.xadd(keys.replies(lost.gateway), {"f": frame})
        else:
            # Nobody waits for it: its gateway is gone, or has taken it back.
            await self._catalogue.queue(model).cancel(lost.job_id, lost.tenant)

    async def _check_silent_jobs(self) -> None:
        """Fail jobs that nobody claims in time or will claim, and jobs that are over as far as Redis knows.

        The last happens when the reply that ended a job was lost, or Redis lost the job itself: a receipt
        names no worker.
        """
        now = time.monotonic()
        silent = [
            t for t in self._tickets.values() if max(t.check_at, t.heard_at + SILENCE_SECONDS) < now
        ]
        if not silent:
            return
        pipeline = self._client.pipeline(transaction=False)
        for ticket in silent:
            ticket.check_at = now + SILENCE_SECONDS
            pipeline.execute_command("HGET", keys.job(ticket.model, ticket.job.id), "worker")
        workers = await pipeline.execute()
        for ticket, worker in zip(silent, workers, strict=True):
            # A reply may have come while Redis was asked.
            if ticket.heard_at > now or ticket.job.handle not in self._tickets:
                continue
            if worker is None:
                self._fail(ticket, FailureCode.REPLIES_LOST)
            elif worker == b"" and now - ticket.enqueued_at > self._queue_timeout_seconds:
                self._fail(ticket, FailureCode.QUEUE_TIMEOUT)
            elif worker == b"" and not self._catalogue.is_served(ticket.model):
                self._fail(ticket, FailureCode.NO_WORKER)

    def _forget(self, tickets: Iterable[Ticket]) -> None:
        for ticket in tickets:
            self._tickets.pop(ticket.job.handle, None)


_background: set[asyncio.Task[None]] = set()


def _in_background(work: Coroutine[Any, Any, None]) -> None:
    task = asyncio.ensure_future(work)
    _background.add(task)
    task.add_done_callback(_background.discard)


def _entries(reply: Any) -> list[tuple[bytes, dict[bytes, bytes]]]:
    """Return the entries of an XREAD reply, which is a dict or a list by protocol version."""
    if not reply:
        return []
    streams = reply.items() if isinstance(reply, dict) else reply
    return [entry for _, entries in streams for entry in entries]
