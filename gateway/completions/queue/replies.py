"""Replies: apply the messages of workers to the jobs in flight."""

import logging
import time
from collections.abc import Sequence

from common.tasks import in_background
from contract.messages import (
    AttemptMessage,
    Delta,
    Frame,
    JobFailed,
    JobFinished,
    JobPreempted,
    JobReturned,
    JobStarted,
    PromptScored,
    ReturnReason,
)
from contract.outcomes import FailureCode
from gateway.completions.queue.jobs import JobsInFlight
from gateway.completions.queue.recovery import Recoveries
from gateway.completions.queue.ticket import GENERATING, RECOVERING, Ticket
from gateway.models.catalogue import Catalogue
from gateway.platform import telemetry

logger = logging.getLogger(__name__)


class Replies:
    """Matches a message to its job by the handle that the job was enqueued with."""

    def __init__(self, jobs: JobsInFlight, catalogue: Catalogue) -> None:
        self.recoveries = Recoveries(catalogue, jobs, self._receive_any)
        self._jobs = jobs
        self._tickets = jobs.tickets
        self.lost_prompts = 0
        """Jobs that workers returned because Redis lacks chunks of their prompts."""

    def apply(self, frame: Frame) -> None:
        """Apply the messages of one worker, or the notice that other gateways shed jobs."""
        now = time.monotonic()
        worker = frame.worker
        for preempted in frame.preempted:
            self._receive_any(worker, preempted)
        for started in frame.started:
            self._receive(worker, started, now)
        for scored in frame.prompts:
            self._receive(worker, scored, now)
        self._receive_deltas(worker, frame.deltas, now)
        for finished in frame.finished:
            self._receive(worker, finished, now)
        for failed in frame.failed:
            if failed.code is FailureCode.SHED:
                self._shed(failed)
            else:
                self._receive(worker, failed, now)
        for returned in frame.returned:
            self._take_back(worker, returned, now)

    def note_gap(self, worker: str) -> None:
        """Revive all jobs of which a message may have been in a lost frame of this worker."""
        for ticket in list(self._tickets.values()):
            if ticket.worker == worker:
                self.recoveries.retry(ticket, "replies_lost")
            elif ticket.worker is None:
                ticket.gaps |= {worker}
            if ticket.recovery is not None and ticket.recovery.worker in {None, worker}:
                ticket.recovery.has_gap = True

    def _receive_deltas(self, worker: str, deltas: Sequence[Delta], now: float) -> None:
        """Receive deltas. Like `_receive`, but on the hot path: it runs for every token."""
        for delta in deltas:
            ticket = self._tickets.get(delta.handle)
            if ticket is None or (
                (delta.attempt != ticket.attempt or worker != ticket.worker)
                and not self._is_current(ticket, worker, delta)
            ):
                continue
            ticket.last_reply_at = now
            take = ticket.generation.take
            if not (
                take is not None
                and ticket.state is GENERATING
                and ticket.paused_at is None
                and take(ticket.prompt_index, ticket.output, delta, now)
            ):
                self._push(ticket, worker, delta, now)

    def _push(self, ticket: Ticket, worker: str, delta: Delta, now: float) -> None:
        """Apply a delta that the consumer does not take at once."""
        generation, output = ticket.generation, ticket.output
        if not output.add(delta):
            self._reject_inconsistent(ticket, worker)
            return
        if delta.token_ids:
            if ticket.state is not GENERATING:
                ticket.progress()
            output.note_latency(delta, now)
        elif delta.pooled and ticket.state is not GENERATING:
            ticket.progress()
        if ticket.paused_at is not None and ticket.state is GENERATING:
            telemetry.RESUMPTION_PAUSE.observe(now - ticket.paused_at, ticket.spans.exemplar())
            ticket.paused_at = None
        if not generation.push(ticket.prompt_index, delta):
            in_background(self._jobs.cancel(generation))

    def _receive(
        self,
        worker: str,
        message: JobStarted | PromptScored | JobFinished | JobFailed,
        now: float,
    ) -> None:
        ticket = self._tickets.get(message.handle)
        if ticket is None or not self._is_current(ticket, worker, message):
            return
        ticket.last_reply_at = now
        if ticket.output.is_known(message):
            return
        if not ticket.output.receive(message):
            self._reject_inconsistent(ticket, worker)
            return
        if isinstance(message, JobFinished) and ticket.is_resumed:
            message = ticket.output.with_total_duration(message, now)
        if isinstance(message, JobFinished | JobFailed):
            self._jobs.end(ticket, message)
        else:
            ticket.generation.push(ticket.prompt_index, message)

    def _take_back(self, worker: str, returned: JobReturned, now: float) -> None:
        """Retry a job that its worker cannot finish."""
        ticket = self._tickets.get(returned.handle)
        if ticket is None or not self._is_current(ticket, worker, returned):
            return
        ticket.last_reply_at = now
        self.lost_prompts += returned.reason is ReturnReason.PROMPT_LOST
        if returned.reason is ReturnReason.ENGINE_DIED and returned.has_progressed:
            ticket.retries.engine_deaths = 0
        self.recoveries.retry(ticket, returned.reason.value)

    def _receive_any(self, worker: str, message: AttemptMessage) -> None:
        now = time.monotonic()
        if isinstance(message, JobPreempted):
            ticket = self._tickets.get(message.handle)
            if ticket is not None and self._is_current(ticket, worker, message):
                ticket.last_reply_at = now
                ticket.generation.note_preempted(message)
        elif isinstance(message, JobReturned):
            self._take_back(worker, message, now)
        elif isinstance(message, Delta):
            self._receive_deltas(worker, [message], now)
        else:
            self._receive(worker, message, now)

    def _shed(self, failed: JobFailed) -> None:
        """End a job that was shed from the queue before a worker claimed it."""
        ticket = self._tickets.get(failed.handle)
        if ticket is not None and ticket.worker is None and ticket.attempt == failed.attempt:
            self._jobs.end(ticket, failed)

    def _is_current(self, ticket: Ticket, worker: str, message: AttemptMessage) -> bool:
        """Whether a message belongs to the ticket's attempt, which may begin with it."""
        if message.attempt == ticket.attempt and worker == ticket.worker:
            return True
        if message.attempt < ticket.attempt:
            if ticket.recovery is None or not ticket.recovery.keep(worker, message):
                telemetry.FENCED_MESSAGES.inc()
            return False
        if message.attempt > ticket.attempt:
            # Only this gateway requeues the job: the reply to that requeue is lost or on its way.
            ticket.follow(message.attempt)
        elif ticket.state is RECOVERING:
            ticket.confirm(message.attempt)
        if ticket.worker is None and worker not in ticket.gaps:
            ticket.claim(worker)
        elif ticket.worker != worker:
            # The first frame of the attempt is lost, or Redis lost a claim and gave another worker
            # a claim with the same number.
            self.recoveries.retry(ticket, "replies_lost")
            return False
        return True

    def _reject_inconsistent(self, ticket: Ticket, worker: str) -> None:
        """Revive a job after a message that contradicts its output."""
        logger.error(
            "a reply of worker %s contradicts the output of job %s",
            worker,
            ticket.job.id,
            extra=ticket.log_ids,
        )
        self.recoveries.retry(ticket, "replies_lost")
