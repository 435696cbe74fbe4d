"""Ticket: one job in flight, and the attempt of it whose replies count."""

import time
from dataclasses import dataclass, field

import msgspec

from contract.messages import GenerationJob, JobMessage, JobReturned
from gateway.dispatch.generation import Generation
from gateway.dispatch.output import JobOutput
from gateway.dispatch.retries import REVIVALS, RetryBudget
from gateway.dispatch.spans import AttemptSpans
from gateway.dispatch.states import (
    ENDED,
    GENERATING,
    QUEUED,
    RECOVERING,
    RUNNING,
    AttemptEvent,
    AttemptState,
    next_state,
)
from gateway.telemetry import LossReason

MAX_KEPT = 4096
"""Limit of messages kept for an attempt that is presumed over."""


@dataclass(slots=True, eq=False)
class Recovery:
    """An attempt that is presumed over, until Redis or a reply shows which attempt is current."""

    attempt: int
    worker: str | None
    """The worker that ran it, if known."""
    job: GenerationJob
    """The job for the next attempt."""
    has_progressed: bool
    """Whether it produced a token."""
    is_returned: bool
    """Whether its worker returned the job."""
    is_revival: bool
    """Whether the job is enqueued whatever Redis stores about it."""
    has_gap: bool
    """Whether a message of it was lost."""
    kept: list[tuple[str, JobMessage | JobReturned]] = field(default_factory=list)
    """Later messages of the attempt and their workers; applied if the attempt still runs."""

    def keep(self, worker: str, message: JobMessage | JobReturned) -> bool:
        """Keep a message of this attempt. Return False if the message can no longer count."""
        if self.is_revival or message.attempt != self.attempt or self.worker not in {None, worker}:
            return False
        self.worker = worker
        if len(self.kept) < MAX_KEPT:
            self.kept.append((worker, message))
        else:
            self.has_gap = True
        return True


class Ticket(msgspec.Struct, eq=False):
    """One job in flight."""

    job: GenerationJob
    model: str
    prompt_index: int
    generation: Generation
    weight: float
    """The tenant's weight."""
    output: JobOutput
    spans: AttemptSpans
    # Every token reads the fields up to `paused_at`: together, they take fewer cache lines.
    attempt: int = 1
    """The claim whose replies count; replies of earlier claims are dropped."""
    state: AttemptState = QUEUED
    """The state of this attempt."""
    worker: str | None = None
    """The worker that sent the first reply of this attempt."""
    last_reply_at: float = msgspec.field(default_factory=time.monotonic)
    paused_at: float | None = None
    """When the last reply of a lost attempt arrived, until the job produces its next token."""
    gaps: frozenset[str] = frozenset()
    """Workers that lost a frame before the first reply of this attempt arrived."""
    recovery: Recovery | None = None
    """The previous attempt, while this one is RECOVERING."""
    retries: RetryBudget = msgspec.field(default_factory=RetryBudget)
    is_resumed: bool = False
    """Whether an earlier attempt had a worker."""
    enqueued_at: float = msgspec.field(default_factory=time.monotonic)
    """When the job was first enqueued, or last presumed to need another worker."""
    check_at: float = 0.0
    """When to query Redis about the job if no reply arrives until then."""

    @classmethod
    def of(
        cls, job: GenerationJob, model: str, index: int, generation: Generation, weight: float
    ) -> "Ticket":
        """Return the ticket of a job that runs prompt `index`."""
        output, spans = JobOutput(job, model), AttemptSpans(job, model)
        return cls(job, model, index, generation, weight, output, spans)

    @property
    def is_followed(self) -> bool:
        """Whether the job is in flight and not being recovered."""
        return self.state is not RECOVERING and self.state is not ENDED

    def claim(self, worker: str) -> None:
        """Note the worker of the first reply of this attempt."""
        self._change(AttemptEvent.CLAIMED)
        self.worker = worker

    def progress(self) -> None:
        """Note the first token of this attempt."""
        self._change(AttemptEvent.PROGRESSED)
        self.retries.revivals = 0

    def follow(self, attempt: int) -> None:
        """Follow another claim from now on."""
        self._change(AttemptEvent.REPLACED)
        self.recovery = None
        self._set_attempt(attempt)

    def presume_over(self, reason: LossReason) -> Recovery:
        """Follow the next attempt, and begin its span. Later messages of this one do not count."""
        now = time.monotonic()
        is_revival, is_failure = reason in REVIVALS, reason != "preempted"
        if not is_revival or self.state in {RUNNING, GENERATING}:
            self.is_resumed = True
        if self.is_resumed:
            self.enqueued_at = now
            if is_failure:
                self.paused_at = self.paused_at or self.last_reply_at
            else:
                self.output.pause()
        self.spans.end(reason, is_failure=is_failure)
        recovery = Recovery(
            self.attempt,
            self.worker,
            self.spans.begin(self._remainder(), self.attempt + 1),
            has_progressed=self.state is GENERATING,
            is_returned=reason in {"draining", "engine_died", "preempted"},
            is_revival=is_revival,
            has_gap=bool(self.gaps),
        )
        self._change(AttemptEvent.PRESUMED_OVER)
        self._set_attempt(self.attempt + 1)
        self.recovery = recovery
        return recovery

    def confirm(self, attempt: int) -> None:
        """Note that this attempt, or a later one, is enqueued: the recovery is over."""
        self._change(AttemptEvent.CONFIRMED)
        self.attempt = max(self.attempt, attempt)
        self.recovery = None

    def restore(self, recovery: Recovery) -> None:
        """Follow the previous attempt again: it still runs, or has completed the job."""
        # The span of that attempt ended when it was presumed lost, and records that.
        self.spans.end("not_needed")
        self.follow(recovery.attempt)
        if recovery.worker is not None:
            self.claim(recovery.worker)
        if recovery.has_progressed:
            self._change(AttemptEvent.PROGRESSED)
        self.retries.refund_loss()
        self.last_reply_at = time.monotonic()

    def end(self, outcome: str, *, is_failure: bool = False) -> None:
        """End the job, and the span of its attempt."""
        self._change(AttemptEvent.ENDED)
        self.recovery = None
        self.spans.end(outcome, is_failure=is_failure)

    def _remainder(self) -> GenerationJob:
        """Return the job for another worker, to resume after the output so far."""
        return msgspec.structs.replace(
            self.job,
            resumption=self.output.resumption(self.last_reply_at),
            is_suspect=self.retries.is_suspect,
        )

    def _change(self, event: AttemptEvent) -> None:
        self.state = next_state(self.state, event)

    def _set_attempt(self, attempt: int) -> None:
        self.attempt = attempt
        self.worker = None
        self.gaps = frozenset()
