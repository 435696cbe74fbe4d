"""Output of a job: everything received from its attempts, from which another worker resumes."""

from array import array
from dataclasses import dataclass, field
from functools import partial

import msgspec

from common.metrics import LightHistogramChild
from contract.messages import (
    Delta,
    GenerationJob,
    JobFailed,
    JobFinished,
    JobMessage,
    JobStarted,
    PromptScored,
    Resumption,
    SequenceProgress,
)
from contract.outcomes import FinishReason


@dataclass(eq=False, slots=True)
class ChoiceOutput:
    """The output received of one choice, or of one candidate if sequences are ranked.

    Takes about four bytes for each token.
    """

    token_ids: "array[int]" = field(default_factory=partial(array, "i"))
    last_tokens_at: float = 0.0
    """When its last tokens arrived; 0 if none have arrived since the job last paused."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    cumulative_logprob: float = 0.0

    def snapshot(self) -> SequenceProgress:
        """Return the progress as it is sent to another worker."""
        return SequenceProgress(
            self.token_ids.tolist(), self.finish_reason, self.stop_reason, self.cumulative_logprob
        )


Classes = list[tuple[str, int]]
"""Exactness classes that generated the tokens of a job, each with the number of tokens before."""


@dataclass(eq=False, slots=True)
class JobOutput:
    """The output of one job so far, without its text."""

    _job: GenerationJob
    latency: LightHistogramChild
    """The metric of its model."""
    choices: tuple[ChoiceOutput, ...] = ()
    """The choices, or the candidates if sequences are ranked. Replicated ones are all equal."""
    classes: Classes = field(default_factory=list)
    _tokens_before: int = 0
    """Tokens of earlier attempts."""
    _first_token_at: float | None = None
    _started: JobStarted | None = None
    _is_prompt_scored: bool = False

    def __post_init__(self) -> None:
        choices = self._job.n if self._job.is_replicated else self._job.best_of
        self.choices = tuple(ChoiceOutput() for _ in range(choices))

    def add(self, delta: Delta) -> bool:
        """Apply new tokens.

        Returns False, changing nothing, if they do not directly follow the last ones.
        """
        if not 0 <= delta.choice < len(self.choices):
            return False
        choice = self.choices[delta.choice]
        if delta.start != len(choice.token_ids):
            return False
        try:
            choice.token_ids.fromlist(delta.token_ids)
        except OverflowError:
            # No vocabulary has such a token id.
            return False
        choice.cumulative_logprob = delta.cumulative_logprob
        if delta.finish_reason is not None:
            choice.finish_reason = delta.finish_reason
            choice.stop_reason = delta.stop_reason
        return True

    def note_latency(self, delta: Delta, now: float) -> None:
        """Record the inter-token latency of one or more tokens that just arrived."""
        choice = self.choices[delta.choice]
        if choice.last_tokens_at:
            self.latency.observe((now - choice.last_tokens_at) / len(delta.token_ids))
        else:
            self._first_token_at = self._first_token_at or now
        choice.last_tokens_at = now

    def pause(self) -> None:
        """Do not record the time until the next tokens as inter-token latency."""
        for choice in self.choices:
            choice.last_tokens_at = 0.0

    def receive(self, message: JobStarted | PromptScored | JobFinished | JobFailed) -> bool:
        """Apply another message than a delta. Return False if it contradicts the output."""
        if isinstance(message, JobFinished):
            if message.exactness_class:
                self._note_class(message.exactness_class, self._tokens_before)
            return self._is_complete(message)
        if isinstance(message, JobStarted):
            if self._started is None or not self._started.prompt_tokens:
                self._started = message
            self._note_class(message.exactness_class, self._tokens)
        elif isinstance(message, PromptScored):
            self._is_prompt_scored = True
        return True

    def replay(self, message: JobMessage, now: float) -> bool:
        """Apply a message that another gateway received. Return False if it contradicts others."""
        if not isinstance(message, Delta):
            return self.receive(message)
        if message.token_ids:
            self._first_token_at = self._first_token_at or now
        return self.add(message)

    def is_known(self, message: JobMessage) -> bool:
        """Whether an earlier attempt sent the same message."""
        if isinstance(message, JobStarted):
            is_counted = self._started is not None and self._started.prompt_tokens > 0
            return is_counted and self.classes[-1][0] == message.exactness_class
        return isinstance(message, PromptScored) and self._is_prompt_scored

    def with_total_duration(self, finished: JobFinished, now: float) -> JobFinished:
        """Return the final message with the generation time of all attempts."""
        if self._first_token_at is None:
            return finished
        generation_ms = (now - self._first_token_at) * 1000
        return msgspec.structs.replace(finished, generation_ms=generation_ms)

    @property
    def _tokens(self) -> int:
        return sum([len(each.token_ids) for each in self.choices])

    @property
    def last_class(self) -> str:
        """The exactness class that generated the last token; empty if there is none."""
        tokens = self._tokens
        return next((name for name, before in reversed(self.classes) if before < tokens), "")

    def _note_class(self, exactness_class: str, tokens: int) -> None:
        """Note the class that generates the tokens after so many."""
        classes = self.classes
        if classes and classes[-1][1] == tokens:
            del classes[-1]  # It has generated none.
        if not classes or classes[-1][0] != exactness_class:
            classes.append((exactness_class, tokens))

    def resumption(self, last_reply_at: float) -> Resumption | None:
        """Return the output for the next worker; None if there is none."""
        began_at, started = self._first_token_at, self._started
        self._tokens_before = self._tokens
        has_received = began_at is not None or any(each.finish_reason for each in self.choices)
        if not has_received and started is None and not self._is_prompt_scored:
            return None
        sequences = self.choices[:1] if self._job.is_replicated else self.choices
        return Resumption(
            [each.snapshot() for each in sequences],
            prompt_tokens=started.prompt_tokens if started else 0,
            cached_tokens=started.cached_tokens if started else 0,
            is_prompt_scored=self._is_prompt_scored,
            generation_ms=0.0 if began_at is None else max(last_reply_at - began_at, 0.0) * 1000,
        )

    def _is_complete(self, finished: JobFinished) -> bool:
        if finished.completion_tokens != sum(len(each.token_ids) for each in self.choices):
            return False
        if self._job.pooling is not None:
            return all(each.finish_reason for each in self.choices)
        if not self._job.is_ranked:
            return True
        chosen = set(finished.chosen)
        return len(chosen) == len(finished.chosen) == self._job.n and chosen <= set(
            range(len(self.choices))
        )
