"""Ticket: one job in flight, the output received so far and the attempt whose replies count."""

import time
from array import array
from dataclasses import dataclass, field

import msgspec

from contract.messages import (
    Delta,
    GenerationJob,
    JobFinished,
    JobReturned,
    JobStarted,
    PromptScored,
    Resumption,
    SequenceProgress,
)
from contract.metrics import LightHistogramChild
from contract.outcomes import FinishReason
from gateway import telemetry
from gateway.dispatch.attempts import Attempts
from gateway.dispatch.generation import Generation, JobMessage

MOST_KEPT = 4096
"""Limit of messages kept for an attempt that may be over, until that is known."""


class Progress:
    """The output received of one sequence. Takes about four bytes for each token."""

    __slots__ = ("cumulative_logprob", "finish_reason", "stop_reason", "token_ids")

    def __init__(self) -> None:
        self.token_ids = array("i")
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.cumulative_logprob = 0.0

    def add(self, delta: Delta) -> None:
        """Apply the next delta."""
        self.token_ids.fromlist(delta.token_ids)
        self.cumulative_logprob = delta.cumulative_logprob
        if delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason
            self.stop_reason = delta.stop_reason

    def snapshot(self) -> SequenceProgress:
        """Return the progress as it is sent to another worker."""
        return SequenceProgress(
            self.token_ids.tolist(), self.finish_reason, self.stop_reason, self.cumulative_logprob
        )


@dataclass(slots=True, eq=False)
class Recovery:
    """An attempt presumed over, until it is known whether another worker resumes its job."""

    attempt: int
    worker: str | None
    """The worker that ran it, if known."""
    job: GenerationJob
    """The job for the next attempt."""
    has_progressed: bool
    """Whether it produced a token."""
    losses: int
    """See `Ticket.losses`; applies once the job has been requeued."""
    is_returned: bool
    """Whether its worker returned the job."""
    is_revival: bool
    """Whether the job is enqueued whatever Redis stores about it."""
    has_gap: bool = False
    """Whether a message of it was lost."""
    kept: list[tuple[str, JobMessage | JobReturned]] = field(default_factory=list)
    """Later messages of the attempt and their workers; applied if the attempt still runs."""

    def keep(self, worker: str, message: JobMessage | JobReturned) -> None:
        """Keep a message until it is known whether it counts."""
        if len(self.kept) < MOST_KEPT:
            self.kept.append((worker, message))
        else:
            self.has_gap = True


@dataclass(slots=True, eq=False)
class Ticket:
    """One job in flight."""

    job: GenerationJob
    model: str
    prompt_index: int
    generation: Generation
    weight: float
    """The tenant's weight."""
    attempt: int = 1
    """The claim whose replies count; replies of earlier claims are dropped."""
    worker: str | None = None
    """The worker that sent the first reply of this attempt."""
    gaps: frozenset[str] = frozenset()
    """Workers that lost a frame before the first reply of this attempt arrived."""
    has_progressed: bool = False
    """Whether this attempt produced a token."""
    recovery: Recovery | None = None
    """Set while it is unknown whether the previous attempt is over."""
    has_begun: bool = False
    """Whether an attempt that a worker had begun is over."""
    strikes: int = 0
    """Engines that died while running the job, since the last attempt that produced a token."""
    losses: int = 0
    """Attempts lost without notice since the last one that produced a token."""
    revivals: int = 0
    """Revivals since the last token."""
    unheard_ends: int = 0
    """Checks in which Redis reported the job as ended although no final reply arrived."""
    waits_since: float = field(default_factory=time.monotonic)
    """When it was last enqueued."""
    heard_at: float = field(default_factory=time.monotonic)
    check_at: float = 0.0
    """When to query Redis about the job if no reply arrives until then."""
    paused_at: float | None = None
    """When the last reply of a lost attempt arrived, until the job produces its next token."""
    first_token_at: float | None = None
    started: JobStarted | None = None
    is_prompt_scored: bool = False
    sequences: list[Progress] = field(init=False)
    """Output received, by sequence."""
    received: list[int] = field(init=False)
    """Tokens received of each choice, or of each candidate where sequences are ranked."""
    heard_of: list[float] = field(init=False)
    """When the last tokens of each of them arrived; 0 if none have arrived."""
    latency: LightHistogramChild = field(init=False)
    """Histogram of the inter-token latency."""
    attempts: Attempts = field(init=False)
    """The attempt spans."""
    _is_replicated: bool = field(init=False)

    def __post_init__(self) -> None:
        self.attempts = Attempts(self.job, self.model)
        self._is_replicated = self.job.is_replicated
        self.sequences = [Progress() for _ in range(self.job.sequences)]
        self.received = [0] * (self.job.n if self._is_replicated else self.job.sequences)
        self.heard_of = [0.0] * len(self.received)
        self.latency = telemetry.INTER_TOKEN_LATENCY.labels(self.model)

    def begin_attempt(self, attempt: int) -> None:
        """Follow another claim from now on."""
        self.attempt = attempt
        self.worker = None
        self.gaps = frozenset()
        self.has_progressed = False

    def receive(self, message: JobMessage, now: float) -> bool:
        """Apply a message. Return False if it contradicts what was received before."""
        if isinstance(message, Delta):
            return self.receive_delta(message, now)
        if isinstance(message, JobFinished):
            return self._is_complete(message)
        if isinstance(message, JobStarted):
            self.started = self.started or message
        elif isinstance(message, PromptScored):
            self.is_prompt_scored = True
        return True

    def receive_delta(self, delta: Delta, now: float) -> bool:
        """Apply new tokens.

        Returns False, changing nothing, if they do not directly follow the last ones.
        """
        choice, received = delta.choice, self.received
        if not 0 <= choice < len(received) or delta.start != received[choice]:
            return False
        try:
            if choice == 0 or not self._is_replicated:
                self.sequences[choice].add(delta)
        except OverflowError:
            # No vocabulary has such a token id.
            return False
        if delta.token_ids:
            received[choice] += len(delta.token_ids)
            if not self.has_progressed:
                self.has_progressed = True
                self.revivals = 0
                self.first_token_at = self.first_token_at or now
        return True

    def note_latency(self, choice: int, tokens: int, now: float) -> None:
        """Record the inter-token latency of one or more tokens that just arrived."""
        before = self.heard_of[choice]
        if before:
            self.latency.observe((now - before) / tokens)
        self.heard_of[choice] = now

    def is_known(self, message: JobMessage) -> bool:
        """Whether an earlier attempt sent the same message."""
        if isinstance(message, JobStarted):
            return self.started is not None
        return isinstance(message, PromptScored) and self.is_prompt_scored

    def rest(self, *, is_suspect: bool) -> GenerationJob:
        """Return the job for another worker, to resume after the output so far."""
        return msgspec.structs.replace(
            self.job, resumption=self._resumption(), is_suspect=is_suspect
        )

    def as_it_took(self, finished: JobFinished, now: float) -> JobFinished:
        """Return the final message with the generation time of all attempts."""
        if not self.has_begun or self.first_token_at is None:
            return finished
        generation_ms = (now - self.first_token_at) * 1000
        return msgspec.structs.replace(finished, generation_ms=generation_ms)

    def _is_complete(self, finished: JobFinished) -> bool:
        if finished.completion_tokens != sum(self.received):
            return False
        if not self.job.is_ranked:
            return True
        chosen = set(finished.chosen)
        return len(chosen) == len(finished.chosen) == self.job.n and chosen <= set(
            range(len(self.sequences))
        )

    def _resumption(self) -> Resumption | None:
        has_received = self.first_token_at is not None or any(
            each.finish_reason for each in self.sequences
        )
        if not has_received and self.started is None and not self.is_prompt_scored:
            return None
        began_at = self.first_token_at
        return Resumption(
            [each.snapshot() for each in self.sequences],
            prompt_tokens=self.started.prompt_tokens if self.started else 0,
            cached_tokens=self.started.cached_tokens if self.started else 0,
            is_prompt_scored=self.is_prompt_scored,
            generation_ms=0.0 if began_at is None else max(self.heard_at - began_at, 0.0) * 1000,
        )
