"""What is in flight for one request: its jobs, and the replies that nobody has taken yet."""

import asyncio
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from contract.messages import Delta, GenerationJob, JobFailed, JobFinished, PromptScored

DELTA_BYTES = 64
"""Memory that an unread delta takes beside its text, about."""

Message = Delta | PromptScored | JobFinished | JobFailed


class Reply(NamedTuple):
    """One message for one of the request's prompts."""

    prompt_index: int
    message: Message


@dataclass(slots=True)
class Ticket:
    """One job in flight, as its gateway follows it."""

    job: GenerationJob
    model: str
    prompt_index: int
    generation: "Generation"
    attempt: int = 1
    """The claim whose replies count; replies of any other attempt are dropped."""
    worker: str | None = None
    """Who sent the first reply."""
    gaps: frozenset[str] = frozenset()
    """Workers of whom a frame was lost before the first reply came."""
    enqueued_at: float = field(default_factory=time.monotonic)
    heard_at: float = field(default_factory=time.monotonic)
    check_at: float = 0.0
    """When to ask Redis about the job if nothing is heard of it until then."""

    def begin_attempt(self, attempt: int) -> None:
        """Follow another claim from now on."""
        self.attempt = attempt
        self.gaps = frozenset()


class Generation:
    """The jobs of one request, and a bounded inbox for their replies.

    The reply reader calls `push`; one consumer awaits `replies`.
    """

    def __init__(self, *, max_unread_bytes: int) -> None:
        self.tickets: list[Ticket] = []
        self.finished: dict[int, JobFinished] = {}
        """The ends of its jobs, by prompt."""
        self.received_tokens: Counter[int] = Counter()
        """Completion tokens that came, by prompt."""
        self.overflowed = False
        """Whether replies were dropped because the consumer does not keep up."""
        self._max_unread_bytes = max_unread_bytes
        self._unread_bytes = 0
        self._replies: list[Reply] = []
        self._waiter: asyncio.Future[None] | None = None

    def push(self, prompt_index: int, message: Message) -> bool:
        """Add a reply and wake the consumer. Return False if it is dropped because there is no room."""
        if isinstance(message, Delta):
            self.received_tokens[prompt_index] += len(message.token_ids)
            self._unread_bytes += len(message.text) + DELTA_BYTES
            if self._unread_bytes > self._max_unread_bytes:
                self.overflowed = True
                self.wake()
                return False
        elif isinstance(message, JobFinished):
            self.finished[prompt_index] = message
        self._replies.append(Reply(prompt_index, message))
        self.wake()
        return True

    def wake(self) -> None:
        """Let the consumer go on with whatever has come, even if that is nothing."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def replies(self) -> list[Reply]:
        """Wait until there are replies or `wake` is called; return all that nobody has taken yet."""
        if not self._replies:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        taken, self._replies = self._replies, []
        self._unread_bytes = 0
        return taken
