"""Generation: the jobs in flight of one request, and their unread replies."""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Final, NamedTuple

import msgspec

from contract.messages import (
    Delta,
    GenerationJob,
    JobFailed,
    JobFinished,
    JobMessage,
    JobPreempted,
    JobStarted,
    PromptScored,
)
from gateway.completions.queue.output import Classes, JobOutput

DELTA_BYTES = 64
"""Approximate memory of an unread delta beside its text; each tool call piece takes as much."""

Turn = Callable[[], AbstractAsyncContextManager[None]]
"""Returns the context in which the event loop processes a slice of long work."""

REPLIES_AT_ONCE: Final = 8
"""Replies that are processed in one slice: with log-probabilities they take a millisecond."""

Message = Delta | PromptScored | JobFinished | JobFailed
"""A message that the dispatcher delivers to a request."""

Take = Callable[[int, JobOutput, Delta, float], bool]
"""Adds a delta to the output of a prompt's job and delivers it, in place of `push`.

Its last argument is the monotonic time. Returns False, changing nothing, if it cannot.
"""


class Reply(NamedTuple):
    """One message for one of the request's prompts."""

    prompt_index: int
    message: JobMessage


@dataclass(eq=False, kw_only=True)
class Generation:
    """The jobs of one request, and a bounded inbox for their replies.

    The reply reader calls `push`; one consumer awaits `replies`. While a consumer waits, the reply
    reader may call its `take` instead, without an inbox and a wake-up.
    """

    max_unread_bytes: int
    turn: Turn = nullcontext
    """Entered for each slice of many replies."""
    jobs: Sequence[GenerationJob] = ()
    """The enqueued jobs, by prompt."""
    started: dict[int, JobStarted] = field(default_factory=dict)
    """What engines reported about their prompts, by prompt."""
    finished: dict[int, JobFinished] = field(default_factory=dict)
    """The final messages of its jobs, by prompt."""
    received_tokens: defaultdict[int, int] = field(default_factory=partial(defaultdict, int))
    """Completion tokens received, by prompt; for ranked sequences, those of all candidates."""
    classes: dict[int, Classes] = field(default_factory=dict)
    """The exactness classes that generated the tokens, by prompt."""
    preempted: list[int] = field(default_factory=lambda: [0, 0])
    """How often its sequences left an engine, and the tokens that are then computed again."""
    overflowed: bool = False
    """Whether replies were dropped because the consumer was too slow."""
    on_reply: Callable[[int, JobMessage], None] | None = None
    """Called with the prompt and each message that is pushed, even if it is later dropped."""
    journal: list[msgspec.Raw] | None = None
    """Where `take` records encoded deltas, in place of `on_reply`."""
    take: Take | None = None
    """Set while the consumer waits and has processed everything before."""
    _may_take: bool = True
    _unread_bytes: int = 0
    _replies: list[Reply] = field(default_factory=list)
    _waiter: asyncio.Future[None] | None = None
    _selections: "dict[int, Selection]" = field(default_factory=dict)
    _is_detached: bool = False

    def expect(self, prompt_index: int, job: GenerationJob) -> None:
        """Register the job of a prompt, before the first message of that job is pushed."""
        if job.is_ranked:
            self._selections[prompt_index] = Selection()
            self._may_take = False

    def push(self, prompt_index: int, message: JobMessage) -> bool:
        """Add a received message and wake the consumer. Return False if there was no room."""
        if self.on_reply is not None:
            self.on_reply(prompt_index, message)
        if isinstance(message, Delta):
            self.received_tokens[prompt_index] += len(message.token_ids)
        elif isinstance(message, JobFinished):
            self.finished[prompt_index] = message
        elif isinstance(message, JobStarted):
            self.started[prompt_index] = message
        if self._is_detached:
            return True
        if prompt_index in self._selections and not isinstance(message, JobStarted):
            # Candidates are never dropped: their size was checked before the request ran.
            chosen = self._selections[prompt_index].take(message)
            self._replies += [Reply(prompt_index, each) for each in chosen]
            if chosen:
                self.wake()
            return True
        return self._keep(prompt_index, message)

    def note_preempted(self, message: JobPreempted) -> None:
        """Count sequences that left an engine."""
        self.preempted[0] += message.sequences
        self.preempted[1] += message.recomputed_tokens

    def delivered_tokens(self, prompt_index: int) -> int:
        """Return how many completion tokens of a prompt the client may have received."""
        is_ranked = any(job.is_ranked for job in self.jobs[prompt_index : prompt_index + 1])
        if is_ranked and prompt_index not in self.finished:
            return 0  # The chosen candidates are not known before the job ends.
        return self.received_tokens[prompt_index]

    def detach(self) -> None:
        """Keep no more replies: the consumer is gone, but the jobs continue."""
        self._is_detached = True
        self._replies.clear()
        self._selections.clear()

    def forbid_take(self) -> None:
        """Push every message from now on."""
        self._may_take, self.take = False, None

    def release(self) -> None:
        """Break reference cycles, so that memory is freed without the garbage collector."""
        self.jobs = ()
        self.on_reply = self.journal = None

    def wake(self) -> None:
        """Wake the consumer, even if there are no replies."""
        self.take = None
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def replies(self, take: Take | None = None) -> list[Reply]:
        """Wait until there are replies or `wake` is called; return all unread replies.

        While this waits, the reply reader calls `take` with each delta. A delta that it does not
        take ends the wait.
        """
        if not self._replies:
            self._waiter = asyncio.get_running_loop().create_future()
            self.take = take if self._may_take else None
            try:
                await self._waiter
            finally:
                self._waiter = self.take = None
        taken, self._replies = self._replies, []
        self._unread_bytes = 0
        return taken

    def turn_for(self, replies: list[Reply]) -> AbstractAsyncContextManager[None]:
        """Return the context in which up to REPLIES_AT_ONCE replies are processed."""
        return nullcontext() if len(replies) < REPLIES_AT_ONCE else self.turn()

    def _keep(self, prompt_index: int, message: JobMessage) -> bool:
        if isinstance(message, Delta):
            self._unread_bytes += _size(message)
            if self._unread_bytes > self.max_unread_bytes:
                self.overflowed = True
                self.wake()
                return False
        self._replies.append(Reply(prompt_index, message))
        self.wake()
        return True


class Selection:
    """Holds back the candidates of one job until its end reports which of them are chosen.

    Messages enter as received, and leave as from a job without ranking.
    """

    def __init__(self) -> None:
        self._candidates: defaultdict[int, list[Delta]] = defaultdict(list)

    def take(self, message: Message) -> list[Message]:
        """Return the messages that can be sent now, numbered by the choices of the response."""
        if isinstance(message, Delta):
            self._candidates[message.choice].append(message)
            return []
        released: list[Message] = []
        if isinstance(message, JobFinished):
            for choice, candidate in enumerate(message.chosen):
                released += [
                    msgspec.structs.replace(delta, choice=choice)
                    for delta in self._candidates[candidate]
                ]
        if not isinstance(message, PromptScored):
            self._candidates.clear()
        released.append(message)
        return released


def in_slices(replies: list[Reply]) -> list[list[Reply]]:
    """Split replies into slices of REPLIES_AT_ONCE; fewer replies are one slice, even if empty."""
    if len(replies) <= REPLIES_AT_ONCE:
        return [replies]
    starts = range(0, len(replies), REPLIES_AT_ONCE)
    return [replies[start : start + REPLIES_AT_ONCE] for start in starts]


def _size(delta: Delta) -> int:
    size = len(delta.text) + DELTA_BYTES
    if delta.reasoning or delta.calls:
        size += len(delta.reasoning)
        size += sum(len(piece.arguments) + DELTA_BYTES for piece in delta.calls)
    return size
