"""History of a response: rebuilt from its journal and from replies that its owner did not read."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from contract.messages import (
    Delta,
    Frame,
    GenerationJob,
    JobFailed,
    JobFinished,
    JobMessage,
    JobStarted,
    PromptScored,
)
from gateway.completions.stored.journal import Received
from gateway.records.usage_record import Counts


@dataclass(slots=True)
class JobHistory:
    """The messages received of one job, summarized."""

    attempt: int = 0
    """The latest attempt of which a message was received."""
    tokens: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))
    """Tokens received of each choice; where sequences are ranked, of each sequence."""
    prompt_tokens: int = 0
    """0 until a worker has reported that it processed the prompt."""
    cached_tokens: int = 0
    is_scored: bool = False
    is_started: bool = False
    end: JobFinished | JobFailed | None = None


class History:
    """The messages of a response, in the order in which they were accepted."""

    def __init__(self, jobs: Sequence[GenerationJob]) -> None:
        self.received: list[Received] = []
        self.jobs = [JobHistory() for _ in jobs]
        self._prompts = [len(job.prompt_token_ids) for job in jobs]

    @property
    def has_finished(self) -> bool:
        """Whether every job has finished."""
        return all(isinstance(job.end, JobFinished) for job in self.jobs)

    @property
    def failure(self) -> JobFailed | None:
        """The failure of the response, or None."""
        for job in self.jobs:
            if isinstance(job.end, JobFailed):
                return job.end
        return None

    def counts(self) -> Counts:
        """Return the token counts of the messages received."""
        return Counts(
            sum(job.prompt_tokens for job in self.jobs),
            sum(job.cached_tokens for job in self.jobs),
            sum(sum(job.tokens.values()) for job in self.jobs),
        )

    def of(self, prompt_index: int) -> list[JobMessage]:
        """Return the messages of one job."""
        return [message for index, message in self.received if index == prompt_index]

    def add(self, received: Iterable[Received]) -> None:
        """Add messages of the journal: they were accepted when they were written."""
        for each in received:
            self._apply(each)
            self.received.append(each)

    def add_unread(self, received: Iterable[Received]) -> list[Received]:
        """Add messages that an owner may have accepted before it died. Return those accepted now.

        Messages of a lost attempt count up to the point where the next attempt resumes. Later
        messages of a lower attempt are void.
        """
        written = len(self.received)
        for each in received:
            self._drop_superseded(each, written)
            if self._fits(each):
                self._apply(each)
                self.received.append(each)
        return self.received[written:]

    def _apply(self, each: Received) -> None:
        job, message = self.jobs[each.prompt_index], each.message
        job.attempt = max(job.attempt, message.attempt)
        if isinstance(message, Delta):
            job.tokens[message.choice] += len(message.token_ids)
            job.prompt_tokens = job.prompt_tokens or self._prompts[each.prompt_index]
        elif isinstance(message, PromptScored):
            job.is_scored = True
        elif isinstance(message, JobStarted):
            job.is_started = True
        else:
            job.end = message
        if isinstance(message, JobStarted | JobFinished):
            job.prompt_tokens, job.cached_tokens = message.prompt_tokens, message.cached_tokens

    def _fits(self, each: Received) -> bool:
        job, message = self.jobs[each.prompt_index], each.message
        if job.end is not None or message.attempt < job.attempt:
            return False
        if isinstance(message, Delta):
            return message.start == job.tokens[message.choice]
        if isinstance(message, PromptScored):
            return not job.is_scored
        if isinstance(message, JobStarted):
            return not job.is_started
        if isinstance(message, JobFinished):
            # If not, a message was lost: the job resumes after the output so far.
            return message.completion_tokens == sum(job.tokens.values())
        return True

    def _drop_superseded(self, each: Received, written: int) -> None:
        """Remove messages of lower attempts after the point where a later attempt resumes."""
        job, message = self.jobs[each.prompt_index], each.message
        overlaps = isinstance(message, Delta) and message.start < job.tokens[message.choice]
        if message.attempt <= job.attempt and not overlaps:
            return
        valid = [one for one in self.received[written:] if not _is_void(one, each)]
        if len(valid) < len(self.received) - written:
            self._rebuild([*self.received[:written], *valid])

    def _rebuild(self, received: list[Received]) -> None:
        self.received = []
        self.jobs = [JobHistory() for _ in self.jobs]
        self.add(received)


def frame_messages(frame: Frame) -> Iterator[JobMessage]:
    """Yield the messages of a frame that belong into journals, in the order in which they count."""
    yield from frame.started
    yield from frame.prompts
    yield from frame.deltas
    yield from frame.finished
    yield from frame.failed


def _is_void(earlier: Received, later: Received) -> bool:
    old, new = earlier.message, later.message
    if earlier.prompt_index != later.prompt_index or old.attempt >= new.attempt:
        return False
    if isinstance(old, Delta):
        return isinstance(new, Delta) and old.choice == new.choice and old.start >= new.start
    return isinstance(old, JobFinished | JobFailed)
