"""One job in flight as its gateway follows it: what was received of it, and from which attempt more may come."""

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
"""Messages of an attempt that may be over which are kept until that is known."""


class Progress:
    """What was received of one sequence. Takes about four bytes for each token."""

    __slots__ = ("cumulative_logprob", "finish_reason", "stop_reason", "token_ids")

    def __init__(self) -> None:
        self.token_ids = array("i")
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.cumulative_logprob = 0.0

    def add(self, delta: Delta) -> None:
        """Take in what comes next."""
        self.token_ids.fromlist(delta.token_ids)
        self.cumulative_logprob = delta.cumulative_logprob
        if delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason
            self.stop_reason = delta.stop_reason

    def snapshot(self) -> SequenceProgress:
        """Return it as it is told to another worker."""
        return SequenceProgress(
            self.token_ids.tolist(), self.finish_reason, self.stop_reason, self.cumulative_logprob
        )


@dataclass(slots=True, eq=False)
class Recovery:
    """An attempt that is taken to be over, until it is known whether its job goes on elsewhere."""

    attempt: int
    worker: str | None
    """Who ran it, if that was heard."""
    job: GenerationJob
    """What another worker is to go on with."""
    has_progressed: bool
    """Whether a token came from it."""
    losses: int
    """See `Ticket`; it holds once the job has been given to another worker."""
    is_returned: bool
    """Whether its worker gave it back by itself."""
    is_revival: bool
    """Whether the job is put on the queue whatever Redis knows of it."""
    has_gap: bool = False
    """Whether a message of it was lost."""
    kept: list[tuple[str, JobMessage | JobReturned]] = field(default_factory=list)
    """What it has said since, and by whom; of use if it turns out to go on."""

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
    """Of its tenant."""
    attempt: int = 1
    """The claim whose replies count; replies of any earlier one are dropped."""
    worker: str | None = None
    """Who sent the first reply of this attempt."""
    gaps: frozenset[str] = frozenset()
    """Workers of whom a frame was lost before the first reply of this attempt came."""
    has_progressed: bool = False
    """Whether a token came from this attempt."""
    recovery: Recovery | None = None
    """Set while it is open whether the attempt before this one is over."""
    has_begun: bool = False
    """Whether an attempt is over that a worker had begun."""
    strikes: int = 0
    """Engines that died with it aboard, since the last one from which a token came."""
    losses: int = 0
    """Attempts that were lost without a word since the last one from which a token came."""
    revivals: int = 0
    """How often it was revived since the last token."""
    unheard_ends: int = 0
    """How often Redis has said that it is over, and nothing was heard of that."""
    waits_since: float = field(default_factory=time.monotonic)
    """When it was put on the queue, the last time."""
    heard_at: float = field(default_factory=time.monotonic)
    check_at: float = 0.0
    """When to ask Redis about the job if nothing is heard of it until then."""
    paused_at: float | None = None
    """When the last reply came, while it waits for the next token of a job that was lost."""
    first_token_at: float | None = None
    started: JobStarted | None = None
    is_prompt_scored: bool = False
    sequences: list[Progress] = field(init=False)
    """What was received of each sequence."""
    received: list[int] = field(init=False)
    """Tokens received of each choice, or of each candidate where sequences are ranked."""
    heard_of: list[float] = field(init=False)
    """When the last tokens came of each of them; 0 if none have come yet."""
    latency: LightHistogramChild = field(init=False)
    """Where the time between tokens is noted."""
    attempts: Attempts = field(init=False)
    """Their spans."""
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
        """Take in a message. Return False if it does not fit to what was received before."""
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
        """Take in new tokens. Return False, changing nothing, if they do not come right after the last ones."""
        choice, received = delta.choice, self.received
        if not 0 <= choice < len(received) or delta.start != received[choice]:
            return False
        try:
            if choice == 0 or not self._is_replicated:
                self.sequences[choice].add(delta)
        except OverflowError:
            # No vocabulary has such a token.
            return False
        if delta.token_ids:
            received[choice] += len(delta.token_ids)
            if not self.has_progressed:
                self.has_progressed = True
                self.revivals = 0
                self.first_token_at = self.first_token_at or now
        return True

    def note_latency(self, choice: int, tokens: int, now: float) -> None:
        """Note the time that tokens of a choice, at least one, took which came now."""
        before = self.heard_of[choice]
        if before:
            self.latency.observe((now - before) / tokens)
        self.heard_of[choice] = now

    def is_known(self, message: JobMessage) -> bool:
        """Whether an earlier attempt has told the same."""
        if isinstance(message, JobStarted):
            return self.started is not None
        return isinstance(message, PromptScored) and self.is_prompt_scored

    def rest(self, *, is_suspect: bool) -> GenerationJob:
        """Return the job as another worker is to go on with it."""
        return msgspec.structs.replace(
            self.job, resumption=self._resumption(), is_suspect=is_suspect
        )

    def as_it_took(self, finished: JobFinished, now: float) -> JobFinished:
        """Return the end of the job with the time that all its attempts took, as clients see it."""
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
