"""History of a response: rebuilt from its journal and from replies that its owner did not read.

The former owner left the latter in its stream, which is read once for all its responses.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, Final

import msgspec

from contract import keys, messages
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
from contract.scripts import CommandExecutor
from gateway.completions.queue.reader import EntryId, entry_id_of
from gateway.completions.stored.journal import Received

FRAMES_AT_ONCE: Final = 64

logger = logging.getLogger(__name__)


class UnreadReplies:
    """The reply stream of one former owner, from the first entry that a takeover needed.

    A gateway that dies may leave hundreds of responses. Reading its stream for each of them would
    keep the event loop of the next owner busy for seconds.
    """

    def __init__(self, executor: CommandExecutor, *, former: str, gateway: str) -> None:
        """`gateway` takes responses of `former` over."""
        self._executor = executor
        self._stream = keys.replies(former)
        self._gateway = gateway
        self._first: EntryId | None = None
        self._last: EntryId | None = None
        """All entries after `_first`, up to `_last`, were read."""
        self._by_handle = defaultdict[int, list[tuple[EntryId, int, JobMessage]]](list)
        """Messages with their entries, and their places in these."""
        self._lock = asyncio.Lock()

    async def of(self, handles: Sequence[int], *, after: EntryId) -> list[Received]:
        """Return the replies to the jobs of one response after an entry, in order.

        `handles[i]` is the handle of prompt `i`. The former owner may live, although it sent no
        heartbeat. It delivers no reply after the notice that ends what is returned, so its clients
        received nothing else. Raises RedisError.
        """
        end = await self._stop_former(handles)
        async with self._lock:
            if self._first is None or self._last is None:
                self._first = self._last = after
            if after < self._first:
                await self._read(after, self._first)
                self._first = after
            if end > self._last:
                await self._read(self._last, end)
                self._last = end
        found = [
            (entry, place, Received(index, message))
            for index, handle in enumerate(handles)
            for entry, place, message in self._by_handle[handle]
            if after < entry < end
        ]
        return [received for *_, received in sorted(found, key=itemgetter(0, 1))]

    async def _stop_former(self, handles: Sequence[int]) -> EntryId:
        notice = messages.encode(Frame(self._gateway, 0, taken_over=list(handles)))
        send = self._executor.execute_command
        entry, _ = await asyncio.gather(
            send("XADD", self._stream, "*", "f", notice),
            send("EXPIRE", self._stream, keys.REPLIES_SECONDS),
        )
        return entry_id_of(entry)

    async def _read(self, after: EntryId, until: EntryId) -> None:
        found: list[tuple[EntryId, int, JobMessage]] = []
        frames: Any = [None] * FRAMES_AT_ONCE
        while len(frames) == FRAMES_AT_ONCE:
            frames = await self._executor.execute_command(
                *("XRANGE", self._stream, f"({_text(after)}", _text(until)),
                *("COUNT", FRAMES_AT_ONCE),
            )
            for entry, fields in frames:
                after = entry_id_of(entry)
                found += [
                    (after, place, message) for place, message in enumerate(_messages(fields))
                ]
        for each in found:
            self._by_handle[each[-1].handle].append(each)


def _messages(fields: dict[bytes, bytes]) -> list[JobMessage]:
    try:
        return list(frame_messages(messages.decode_frame(fields[b"f"])))
    except (msgspec.MsgspecError, KeyError):
        # The frame is lost; its jobs resume after the output before it.
        logger.exception("cannot decode a reply frame")
        return []


def _text(entry: EntryId) -> str:
    return f"{entry[0]}-{entry[1]}"


@dataclass(slots=True)
class JobHistory:
    """The messages received of one job, summarized."""

    attempt: int = 0
    """The latest attempt of which a message was received."""
    tokens: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))
    """Tokens received of each choice; where sequences are ranked, of each sequence."""
    is_scored: bool = False
    exactness_class: str = ""
    """Of the last attempt that has started; empty if none has."""
    end: JobFinished | JobFailed | None = None


class History:
    """The messages of a response, in the order in which they were accepted."""

    def __init__(self, jobs: Sequence[GenerationJob]) -> None:
        self.received: list[Received] = []
        self.jobs = [JobHistory() for _ in jobs]

    @property
    def has_ended(self) -> bool:
        """Whether every job has finished, or one has failed."""
        ends = [job.end for job in self.jobs]
        return None not in ends or self.failure is not None

    @property
    def failure(self) -> JobFailed | None:
        """The failure of the response, or None."""
        for job in self.jobs:
            if isinstance(job.end, JobFailed):
                return job.end
        return None

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
        elif isinstance(message, PromptScored):
            job.is_scored = True
        elif isinstance(message, JobStarted):
            job.exactness_class = message.exactness_class
        else:
            job.end = message

    def _fits(self, each: Received) -> bool:
        job, message = self.jobs[each.prompt_index], each.message
        if job.end is not None or message.attempt < job.attempt:
            return False
        if isinstance(message, Delta):
            return message.start == job.tokens[message.choice]
        if isinstance(message, PromptScored):
            return not job.is_scored
        if isinstance(message, JobStarted):
            return message.exactness_class != job.exactness_class
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
