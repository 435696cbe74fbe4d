"""Ticket: one job in flight, and the attempt of it whose replies count.

A job's first attempt starts as QUEUED. When an attempt is presumed over, the ticket follows the
next attempt. That one is RECOVERING until Redis or a reply shows which of the two is current.
"""

import time
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final

import msgspec
from opentelemetry.context import Context
from opentelemetry.trace import INVALID_SPAN, Span, set_span_in_context

from common import logs
from common import tracing as names
from common.tracing import traceparent_of
from contract.affinity import class_affinity
from contract.messages import AttemptMessage, GenerationJob, about
from contract.outcomes import FailureCode
from gateway.completions.queue.generation import Generation
from gateway.completions.queue.output import JobOutput
from gateway.platform import tracing
from gateway.platform.telemetry import INTER_TOKEN_LATENCY, LossReason


@dataclass(eq=False, slots=True)
class AttemptSpans:
    """The trace spans of a job's attempts. At most one is open; an untraced request has none.

    A span lasts from the time the job is enqueued until the attempt ends or is lost, and links to
    the previous one. The worker's spans are its children. The gateway exports it, so the trace
    shows an attempt even if its worker was killed.
    """

    _request: str
    """The `traceparent` of the parent of all attempts."""
    _model: str
    _earlier: str = ""
    """The `traceparent` of the previous attempt."""
    _span: Span = INVALID_SPAN
    """The open attempt."""

    def begin(self, job: GenerationJob, number: int) -> GenerationJob:
        """Begin attempt `number`, counted from 1, and return the job to enqueue for it."""
        if not self._request:
            return job
        self._span = tracing.attempt_span(
            self._request,
            earlier=self._earlier,
            attributes={
                names.ATTEMPT_NUMBER: number,
                names.GATEWAY_ID: job.gateway,
                names.GEN_AI_REQUEST_MODEL: self._model,
                names.JOB_ID: job.id,
                names.REQUEST_ID: job.request_id,
                names.TENANT_ID: job.tenant,
            },
        )
        earlier = self._earlier
        self._earlier = traceparent_of(set_span_in_context(self._span, Context()))
        return msgspec.structs.replace(job, traceparent=self._earlier, earlier_traceparent=earlier)

    def end(self, outcome: str, *, is_failure: bool = False) -> None:
        """End the open attempt, if any."""
        self._span.set_attribute(names.OUTCOME, outcome)
        if is_failure:
            tracing.fail(self._span, outcome)
        self._span.end()
        self._span = INVALID_SPAN

    def exemplar(self) -> dict[str, str] | None:
        """Return the exemplar of the open attempt for a histogram."""
        return tracing.exemplar_of(self._span)


MAX_LOSSES = 5
"""Consecutive attempts that may be lost without a token; the job fails with the last of them."""
MAX_ENGINE_DEATHS = 2
"""Engines that may die while running a job; the job fails with the last of them."""
MAX_ADAPTER_FAILURES = 3
"""Workers that may fail to get the files of a job's adapter; the job fails with the last of
them."""
MAX_REVIVALS = 5
"""Revivals without a token in between; the job fails at the next one."""
MAX_MISSED_COMPLETIONS = 2
"""Checks that may find a completed job without its final reply; the last one revives the job."""

REVIVALS: Final[frozenset[LossReason]] = frozenset({"adopted", "forgotten", "replies_lost"})
"""Reasons for which a job is enqueued again whatever Redis stores about it."""

MAX_KEPT = 4096
"""Limit of messages kept for an attempt that is presumed over."""


class RetryBudget(msgspec.Struct):
    """The failed attempts of one job, counted against their limits."""

    losses: int = 0
    """Attempts whose lease expired since the last one that produced a token."""
    engine_deaths: int = 0
    """Engines that died while running the job, since the last attempt that produced a token."""
    revivals: int = 0
    """Revivals since the last token."""
    adapter_failures: int = 0
    """Workers that could not get the files of its adapter."""
    missed_completions: int = 0
    """Checks of this attempt that found the job completed without its final reply."""
    _losses_before: int = 0
    """`losses` before the last attempt was counted."""

    @property
    def is_suspect(self) -> bool:
        """Whether the job may be what kills its workers."""
        return bool(self.engine_deaths or self.losses)

    def spend(self, reason: LossReason, *, has_progressed: bool) -> FailureCode | None:
        """Count an attempt that is over. Return the code with which the job fails, if it must.

        `has_progressed` is whether the attempt produced a token.
        """
        self.missed_completions = 0
        self._losses_before = self.losses
        if has_progressed:
            self.losses = 0
        elif reason == "lease_expired":
            self.losses += 1
            if self.losses >= MAX_LOSSES:
                return FailureCode.WORKER_LOST
        if reason == "engine_died":
            self.engine_deaths += 1
            if self.engine_deaths >= MAX_ENGINE_DEATHS:
                return FailureCode.POISONOUS
        elif reason == "adapter_failed":
            self.adapter_failures += 1
            if self.adapter_failures >= MAX_ADAPTER_FAILURES:
                return FailureCode.ADAPTER_FAILED
        elif reason in REVIVALS:
            self.revivals += 1
            if self.revivals > MAX_REVIVALS:
                return FailureCode.REPLIES_LOST
        return None

    def refund_loss(self) -> None:
        """Do not count the last attempt as lost: it was not over."""
        self.losses = self._losses_before

    def miss_completion(self) -> bool:
        """Count a completion without its final reply. Return whether the reply counts as lost."""
        self.missed_completions += 1
        return self.missed_completions >= MAX_MISSED_COMPLETIONS


class _Constant(Enum):
    # Hashing by identity needs no Python code, unlike that of other enumerations.
    __hash__ = object.__hash__


class AttemptState(_Constant):
    """The state of the attempt whose replies count."""

    QUEUED = auto()
    """No worker has replied."""
    RUNNING = auto()
    """A worker has replied, without a token."""
    GENERATING = auto()
    """The attempt has produced a token."""
    RECOVERING = auto()
    """The previous attempt is presumed over, but this one may not be enqueued."""
    ENDED = auto()
    """The job is no longer in flight."""


class AttemptEvent(_Constant):
    """What changes the state of an attempt."""

    CLAIMED = auto()
    """The first reply of the attempt arrived."""
    PROGRESSED = auto()
    """The first token of the attempt arrived."""
    PRESUMED_OVER = auto()
    """The attempt's lease expired, its worker returned the job, or its replies are lost."""
    CONFIRMED = auto()
    """Redis or a reply shows that the attempt is enqueued."""
    REPLACED = auto()
    """Redis or a reply shows that another attempt is current."""
    ENDED = auto()
    """The job finished, failed or was cancelled."""


QUEUED, RUNNING, GENERATING, RECOVERING, ENDED = AttemptState
_OPEN: Final = (QUEUED, RUNNING, GENERATING, RECOVERING)
_NEXT: Final = {
    AttemptEvent.CLAIMED: {QUEUED: RUNNING},
    AttemptEvent.PROGRESSED: {RUNNING: GENERATING},
    AttemptEvent.PRESUMED_OVER: dict.fromkeys(_OPEN, RECOVERING),
    AttemptEvent.CONFIRMED: {RECOVERING: QUEUED},
    AttemptEvent.REPLACED: dict.fromkeys(_OPEN, QUEUED),
    AttemptEvent.ENDED: dict.fromkeys(_OPEN, ENDED),
}


def next_state(state: AttemptState, event: AttemptEvent) -> AttemptState:
    """Return the state after an event. Raises RuntimeError if the event is impossible."""
    try:
        return _NEXT[event][state]
    except KeyError:
        raise RuntimeError(
            f"{event.name} cannot happen to an attempt that is {state.name}"
        ) from None


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
    kept: list[tuple[str, AttemptMessage]] = field(default_factory=list)
    """Later messages of the attempt and their workers; applied if the attempt still runs."""

    def keep(self, worker: str, message: AttemptMessage) -> bool:
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
    session_id: str = msgspec.field(default_factory=logs.session_id.get)
    """For log records; empty if the request names no session."""

    @classmethod
    def of(
        cls, job: GenerationJob, model: str, index: int, generation: Generation, weight: float
    ) -> "Ticket":
        """Return the ticket of a job that runs prompt `index`."""
        output = JobOutput(job, INTER_TOKEN_LATENCY.labels(model))
        generation.classes[index] = output.classes
        spans = AttemptSpans(job.traceparent, model)
        return cls(job, model, index, generation, weight, output, spans)

    @property
    def log_ids(self) -> dict[str, str]:
        """The `extra` of a log record about the job."""
        return about(self.job) | ({"session_id": self.session_id} if self.session_id else {})

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
            is_returned=reason in {"draining", "engine_died", "preempted", "prompt_lost"},
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
        """Return the job for another worker, to resume after the output so far.

        It has its whole prompt: what it lacked may be why the attempt is over.
        """
        return msgspec.structs.replace(
            self.job,
            resumption=self.output.resumption(self.last_reply_at),
            affinity=class_affinity(self.output.last_class) + self.job.affinity,
            is_suspect=self.retries.is_suspect,
            chunks=b"",
        )

    def _change(self, event: AttemptEvent) -> None:
        self.state = next_state(self.state, event)

    def _set_attempt(self, attempt: int) -> None:
        self.attempt = attempt
        self.worker = None
        self.gaps = frozenset()
