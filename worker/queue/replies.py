"""Reply frames to the gateways: the output of engine steps, one stream entry for each gateway.

While a write is in progress, further steps are collected in the next frame. The worker therefore
slows down in whole frames and never queues writes. It retries a frame under the same number until
Redis accepts it; gateways drop a frame number that they have already received.
"""

import asyncio
import logging
import math
import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import msgspec

from common.tasks import TaskSet
from contract import keys, messages
from contract.messages import (
    Delta,
    Frame,
    JobFailed,
    JobFinished,
    JobPreempted,
    JobReturned,
    JobStarted,
    PromptScored,
)
from contract.outcomes import FailureCode
from contract.queue import LeaseReport
from contract.scripts import CommandExecutor
from worker import telemetry
from worker.retries import Retries

_log = logging.getLogger(__name__)

FRAMES_KEPT_MS = 30_000
"""How long frames stay in a gateway's stream, at least.

The next owner of a dead gateway's responses needs those that no journal has: of the last 13
seconds before its death (`gateway.completions.stored.owned`), and of the eleven until workers stop.
"""

MAX_KEPT_BYTES = 67_108_864
"""Frames of this worker that a gateway's stream keeps at most. A gateway removes what it has read
and stored; one that is this far behind loses frames, and its jobs resume after them."""

TOGETHER_SECONDS = 0.05
"""How long the next frames wait until the last ones are written. A stream whose server fails or
takes longer delays only its own frames."""

UNSTREAMED_START_SECONDS = 0.05
"""How long the start of a job that is not streamed waits for other messages. Most short jobs end
before, and need one frame."""

MOST_DELTAS_IN_FRAME = 2_000
"""Deltas in one frame. More, collected while Redis is unavailable, are split into frames that a
gateway reads at once. Each log-probability in a delta, and as much of a vector, counts as one more
delta."""
BYTES_OF_LOGPROB = 16
"""Approximate size of one log-probability: a short text and a number."""

UNDECODABLE_MESSAGE = "The output could not be decoded."
_OF_JOBS = ("started", "prompts", "deltas", "finished", "failed", "returned", "preempted")
"""The lists in a frame of a worker."""


class KeptFrames:
    """Times and sizes of the frames in one stream that this worker wrote and that are kept."""

    def __init__(self) -> None:
        self._frames: deque[tuple[int, int]] = deque()
        self._bytes = 0
        self.oldest_ms = 0
        """Since when frames are kept, by the clock of Redis. Other workers write to the stream too,
        so that frames before the first one of this worker are kept as long."""

    def add(self, written_ms: int, size: int) -> None:
        """Add a frame. Drop those that are too old, or too large together."""
        if self._frames and written_ms < self._frames[-1][0]:
            # Another Redis has another clock, and a new stream.
            self._frames.clear()
            self._bytes = 0
        self._frames.append((written_ms, size))
        self._bytes += size
        self.oldest_ms = max(written_ms - FRAMES_KEPT_MS, 0)
        while self._bytes > MAX_KEPT_BYTES and len(self._frames) > 1:
            self._bytes -= self._frames.popleft()[1]
            self.oldest_ms = max(self.oldest_ms, self._frames[0][0])
        while self._frames[0][0] < self.oldest_ms:
            self._bytes -= self._frames.popleft()[1]


class Taken(NamedTuple):
    """One frame, and the leases to settle once it is written."""

    gateway: str
    frame: Frame
    to_end: list[LeaseReport]
    to_release: list[LeaseReport]


@dataclass(eq=False, slots=True)
class ReplyOutbox:
    """Messages that wait to be sent to one gateway."""

    gateway: str
    number: int = 0
    prompts: list[PromptScored] = field(default_factory=list)
    deltas: list[Delta] = field(default_factory=list)
    finished: list[JobFinished] = field(default_factory=list)
    failed: list[JobFailed] = field(default_factory=list)
    returned: list[JobReturned] = field(default_factory=list)
    preempted: list[JobPreempted] = field(default_factory=list)
    _started: dict[int, JobStarted] = field(default_factory=dict)
    _started_due_at: float = math.inf
    _frame_end: int = 0
    """Deltas after which the next frame ends, if it was ended before the last one."""
    to_end: list[LeaseReport] = field(default_factory=list)
    """Leases of the finished and failed jobs above; they end once these messages are written."""
    to_release: list[LeaseReport] = field(default_factory=list)
    """Leases of jobs that other workers resume, released once all messages above are written."""

    @property
    def started(self) -> list[JobStarted]:
        """Jobs whose prompts were processed, except those that have ended and are not streamed."""
        return list(self._started.values())

    @property
    def is_due(self) -> bool:
        """Whether there is something to send now."""
        return bool(
            self.deltas
            or self.prompts
            or self.finished
            or self.failed
            or self.preempted
            or self.to_release
            or (self._started and time.monotonic() >= self._started_due_at)
        )

    def start(self, started: JobStarted, *, is_streamed: bool) -> None:
        """Report that the prompt of a job was processed.

        If the job is not streamed, this waits for other messages for up to
        `UNSTREAMED_START_SECONDS`, and then for the next `flush`.
        """
        due_at = 0.0 if is_streamed else time.monotonic() + UNSTREAMED_START_SECONDS
        self._started_due_at = min(self._started_due_at, due_at)
        self._started[started.handle] = started

    def finish(self, finished: JobFinished, report: LeaseReport, *, is_streamed: bool) -> None:
        """Report that a job finished; its lease ends once the message is written.

        A stream may show that the prompt was processed, even if the same frame has the end.
        """
        if not is_streamed:
            self._started.pop(finished.handle, None)
        self.finished.append(finished)
        self.to_end.append(report)

    def fail(self, failed: JobFailed, report: LeaseReport) -> None:
        """Report that a job failed; its lease ends once the message is written."""
        self._started.pop(failed.handle, None)
        self.failed.append(failed)
        self.to_end.append(report)

    def return_job(self, returned: JobReturned, report: LeaseReport) -> None:
        """Return a job for another worker to resume; its lease is released once this is written."""
        self.returned.append(returned)
        self.to_release.append(report)

    def release_lease(self, report: LeaseReport) -> None:
        """Release a lease once all messages in this outbox are written."""
        self.to_release.append(report)

    def end_frame(self) -> None:
        """Send the deltas so far in a frame without later ones."""
        self._frame_end = len(self.deltas)

    def drop(self, handles: set[int]) -> None:
        """Remove the messages of dropped jobs that have not ended."""
        self._frame_end = 0
        self.prompts = [each for each in self.prompts if each.handle not in handles]
        self.deltas = [each for each in self.deltas if each.handle not in handles]
        for handle in handles:
            self._started.pop(handle, None)

    def take(self, worker: str) -> Taken:
        """Remove the next frame and the leases that belong to it."""
        self.number += 1
        started, self._started, self._started_due_at = self.started, {}, math.inf
        prompts, self.prompts = self.prompts, []
        cut, self._frame_end = self._cut(), 0
        deltas, self.deltas = self.deltas[:cut], self.deltas[cut:]
        if self.deltas:
            return Taken(self.gateway, Frame(worker, self.number, started, prompts, deltas), [], [])
        frame = Frame(
            worker,
            self.number,
            started,
            prompts,
            deltas,
            self.finished,
            self.failed,
            self.returned,
            preempted=self.preempted,
        )
        taken = Taken(self.gateway, frame, self.to_end, self.to_release)
        self.finished, self.failed, self.returned, self.preempted = [], [], [], []
        self.to_end, self.to_release = [], []
        return taken

    def _cut(self) -> int:
        """Return the number of deltas in the next frame, never splitting the choices of a token."""
        deltas = self.deltas[: self._frame_end or None]
        sizes = (len(each.logprobs) + len(each.pooled) for each in deltas)
        weights = accumulate(1 + size // BYTES_OF_LOGPROB for size in sizes)
        full = (cut for cut, weight in enumerate(weights, 1) if weight >= MOST_DELTAS_IN_FRAME)
        cut = next(full, len(deltas))
        while cut < len(deltas) and (
            deltas[cut].handle == deltas[cut - 1].handle
            and deltas[cut].choice > deltas[cut - 1].choice
            and not deltas[cut].pooled
        ):
            cut += 1
        return cut


@dataclass(eq=False)
class ReplyWriter:
    """Writes the outboxes of all gateways: the frames of all at once, and then the next ones.

    Each stream has one frame in flight, which is repeated until its server accepts it.
    """

    _executor: CommandExecutor
    _worker: str
    _most_pending_deltas: int
    _on_written: Callable[[list[LeaseReport], list[LeaseReport]], None]

    def __post_init__(self) -> None:
        self.overflowed = asyncio.Event()
        """Set after a failed write if too many deltas are unwritten."""
        self.late: set[str] = set()
        """Gateways whose last frame is not written yet, while others get frames."""
        self._outboxes: dict[str, ReplyOutbox] = {}
        self._tasks = TaskSet()
        self._kept: defaultdict[str, KeptFrames] = defaultdict(KeptFrames)
        """By stream."""
        self._has_messages = asyncio.Event()
        self._drained = asyncio.Event()
        self._drained.set()

    def outbox(self, gateway: str) -> ReplyOutbox:
        """Return the outbox of a gateway. Call `flush` after adding messages."""
        outbox = self._outboxes.get(gateway)
        if outbox is None:
            outbox = self._outboxes[gateway] = ReplyOutbox(gateway)
        return outbox

    def end_frames(self) -> None:
        """Send what all outboxes have in frames without what is added later."""
        for outbox in self._outboxes.values():
            outbox.end_frame()

    @property
    def gateways(self) -> list[str]:
        """Gateways that have an outbox."""
        return list(self._outboxes)

    def remove(self, gateway: str) -> None:
        """Drop the outbox of a gateway that will not read again."""
        self._outboxes.pop(gateway, None)
        self._kept.pop(keys.replies(gateway), None)

    def flush(self) -> None:
        """Request that all outboxes are written that have something to send now."""
        if self._due:
            self._has_messages.set()
            self._drained.clear()

    async def drain(self, timeout_seconds: float) -> None:
        """Wait until everything is written, up to a timeout."""
        try:
            await asyncio.wait_for(self._drained.wait(), timeout_seconds)
        except TimeoutError:
            _log.warning("Replies were still unwritten after %.0f s", timeout_seconds)

    async def run(self) -> None:
        """Write frames until cancelled."""
        try:
            while True:
                await self._has_messages.wait()
                self._has_messages.clear()
                taken = [box.take(self._worker) for box in self._due]
                try:
                    await self._write(taken)
                except Exception:  # Gateways notice that the frames are missing.
                    _log.exception("Lost %d frames", len(taken))
                self._settle([each for each in taken if each.gateway not in self.late])
                if self._due:
                    self._has_messages.set()
                elif not self.late:
                    self._drained.set()
        finally:
            await self._tasks.cancel()

    @property
    def _due(self) -> list[ReplyOutbox]:
        return [box for name, box in self._outboxes.items() if box.is_due and name not in self.late]

    async def _write(self, taken: list[Taken]) -> None:
        """Write frames. Return when each is written or late."""
        payloads = [_encoded(each.frame) for each in taken]
        writes = {
            self._tasks.task(self._keep_sending(each.gateway, payload)): each
            for each, payload in zip(taken, payloads, strict=True)
        }
        if writes:
            _, late = await asyncio.wait(writes, timeout=TOGETHER_SECONDS)
            for write in late:
                self.late.add(writes[write].gateway)
                write.add_done_callback(partial(self._note_written, writes[write]))

    def _note_written(self, taken: Taken, write: asyncio.Task[None]) -> None:
        """End the delay of a stream whose late frame is written."""
        if not write.cancelled():
            self.late.discard(taken.gateway)
            self._settle([taken])
            self._has_messages.set()

    def _settle(self, taken: list[Taken]) -> None:
        self._on_written(
            [report for each in taken for report in each.to_end],
            [report for each in taken for report in each.to_release],
        )

    async def _keep_sending(self, gateway: str, payload: bytes) -> None:
        """Send a frame until Redis accepts it."""
        retries, key = Retries(f"write replies to {gateway}"), keys.replies(gateway)
        while True:
            try:
                entry_id: bytes = await self._executor.execute_command(
                    "XADD", key, "MINID", "~", self._kept[key].oldest_ms, "*", "f", payload
                )
                break
            except Exception as error:
                telemetry.REPLY_WRITE_FAILURES.inc()
                boxes = [self._outboxes[each] for each in self.late if each in self._outboxes]
                if sum(len(box.deltas) for box in boxes) > self._most_pending_deltas:
                    self.overflowed.set()
                await retries.pause(error)
        self._kept[key].add(int(entry_id.partition(b"-")[0]), len(payload))
        retries.recovered()
        telemetry.FRAMES_WRITTEN.inc()


def _encoded(frame: Frame) -> bytes:
    """Encode a frame, without the jobs whose messages cannot be encoded: they fail."""
    try:
        return messages.encode(frame)
    except Exception:  # One job's bytes must not end all jobs.
        _log.exception("Cannot encode a frame")
    lists = {name: getattr(frame, name) for name in _OF_JOBS}
    broken = {
        each.handle: each.attempt
        for entries in lists.values()
        for each in entries
        if not _can_encode(each)
    }
    kept = {name: [e for e in lists[name] if e.handle not in broken] for name in _OF_JOBS}
    kept["failed"] += [
        JobFailed(handle, attempt, FailureCode.ENGINE_ERROR, UNDECODABLE_MESSAGE)
        for handle, attempt in broken.items()
    ]
    return messages.encode(msgspec.structs.replace(frame, **kept))


def _can_encode(message: Any) -> bool:
    try:
        messages.encode(message)
    except Exception:
        return False
    return True
