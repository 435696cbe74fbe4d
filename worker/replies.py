"""Frames to the gateways: what one engine step produced, in one stream entry for each gateway.

While a write is on its way, further steps gather into the next frame, so the worker slows down in steps
of whole frames and never queues writes. A frame is sent again, under the same number, until Redis has
taken it; gateways drop the number they have seen.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

from redis.asyncio import Redis
from redis.exceptions import RedisError

from contract import keys, messages
from contract.messages import (
    Delta,
    Frame,
    JobFailed,
    JobFinished,
    JobReturned,
    JobStarted,
    PromptScored,
)
from contract.queue import LeaseReport
from worker import telemetry
from worker.backoff import Backoff

_log = logging.getLogger(__name__)

MOST_FRAMES_KEPT = 20_000
"""Frames that a gateway's stream keeps, about; older ones were read long ago."""

MOST_DELTAS_IN_FRAME = 2_000
"""A frame that gathers for long, while Redis is away, is cut into frames that a gateway reads at once. Each
log-probability in a delta counts as one more."""
BYTES_OF_LOGPROB = 16
"""About what one takes: a short text and a number."""

Entry = tuple[str, bytes]
"""A stream's key and an encoded frame."""


class Taken(NamedTuple):
    """One frame, and the leases that can go once it is written."""

    gateway: str
    frame: Frame
    to_end: list[LeaseReport]
    to_hand_back: list[LeaseReport]


class Outbox:
    """What waits to be sent to one gateway."""

    __slots__ = (
        "_started",
        "deltas",
        "failed",
        "finished",
        "gateway",
        "number",
        "prompts",
        "returned",
        "to_end",
        "to_hand_back",
    )

    def __init__(self, gateway: str) -> None:
        self.gateway = gateway
        self.number = 0
        self.prompts: list[PromptScored] = []
        self.deltas: list[Delta] = []
        self.finished: list[JobFinished] = []
        self.failed: list[JobFailed] = []
        self.returned: list[JobReturned] = []
        self._started: dict[int, JobStarted] = {}
        self.to_end: list[LeaseReport] = []
        """Leases of jobs whose end is told above; they end once that is written."""
        self.to_hand_back: list[LeaseReport] = []
        """Leases of jobs that others are to go on with, handed back once all that is told is written."""

    @property
    def started(self) -> list[JobStarted]:
        """Jobs whose prompts were read; those that have ended already are not told as well."""
        return list(self._started.values())

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to send."""
        return not (
            self.deltas
            or self.prompts
            or self.finished
            or self.failed
            or self._started
            or self.to_hand_back
        )

    def start(self, started: JobStarted) -> None:
        """Tell that the prompt of a job was read."""
        self._started[started.handle] = started

    def finish(self, finished: JobFinished, report: LeaseReport) -> None:
        """Tell that a job came to its end; its lease ends once that is written."""
        self._started.pop(finished.handle, None)
        self.finished.append(finished)
        self.to_end.append(report)

    def fail(self, failed: JobFailed, report: LeaseReport) -> None:
        """Tell that a job will have no result; its lease ends once that is written."""
        self._started.pop(failed.handle, None)
        self.failed.append(failed)
        self.to_end.append(report)

    def give_back(self, returned: JobReturned, report: LeaseReport) -> None:
        """Tell that another worker is to go on with a job; its lease is given back once that is written."""
        self.returned.append(returned)
        self.to_hand_back.append(report)

    def hand_back(self, report: LeaseReport) -> None:
        """Give a lease back once all that stands here is written."""
        self.to_hand_back.append(report)

    def drop(self, handles: set[int]) -> None:
        """Take back what was to be told of jobs that are given up, and have not ended."""
        self.prompts = [each for each in self.prompts if each.handle not in handles]
        self.deltas = [each for each in self.deltas if each.handle not in handles]
        for handle in handles:
            self._started.pop(handle, None)

    def take(self, worker: str) -> Taken:
        """Remove the next frame and the leases that go with it."""
        self.number += 1
        started, self._started = self.started, {}
        prompts, self.prompts = self.prompts, []
        cut = self._cut()
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
        )
        taken = Taken(self.gateway, frame, self.to_end, self.to_hand_back)
        self.finished, self.failed, self.returned = [], [], []
        self.to_end, self.to_hand_back = [], []
        return taken

    def _cut(self) -> int:
        """Return where the next frame's deltas end: not between the choices that one token is told for."""
        deltas, cut, weight = self.deltas, 0, 0
        for cut, delta in enumerate(deltas, start=1):  # noqa: B007 - where it ended is what counts
            weight += 1 + len(delta.logprobs) // BYTES_OF_LOGPROB
            if weight >= MOST_DELTAS_IN_FRAME:
                break
        while cut < len(deltas) and (
            deltas[cut].handle == deltas[cut - 1].handle
            and deltas[cut].choice > deltas[cut - 1].choice
        ):
            cut += 1
        return cut


class ReplyWriter:
    """Writes the outboxes of all gateways, one pipeline at a time."""

    def __init__(
        self,
        redis: Redis,
        worker: str,
        *,
        most_pending_deltas: int,
        on_written: Callable[[list[LeaseReport], list[LeaseReport]], None],
    ) -> None:
        self._redis = redis
        self._worker = worker
        self._most_pending_deltas = most_pending_deltas
        self._on_written = on_written
        self.on_overflow: Callable[[], None] | None = None
        """Called while too much is unwritten; set by whoever runs jobs."""
        self._outboxes: dict[str, Outbox] = {}
        self._something = asyncio.Event()
        self._nothing = asyncio.Event()
        self._nothing.set()

    def outbox(self, gateway: str) -> Outbox:
        """Return the outbox of a gateway. Call `flush` after putting something in."""
        outbox = self._outboxes.get(gateway)
        if outbox is None:
            outbox = self._outboxes[gateway] = Outbox(gateway)
        return outbox

    @property
    def gateways(self) -> list[str]:
        """Gateways that have an outbox."""
        return list(self._outboxes)

    def forget(self, gateway: str) -> None:
        """Drop the outbox of a gateway that will never read again."""
        self._outboxes.pop(gateway, None)

    def flush(self) -> None:
        """Have everything written that is in the outboxes."""
        self._something.set()
        self._nothing.clear()

    async def drain(self, timeout_seconds: float) -> None:
        """Wait until everything is written, but not forever."""
        try:
            await asyncio.wait_for(self._nothing.wait(), timeout_seconds)
        except TimeoutError:
            _log.warning("Gave up writing replies after %.0f s", timeout_seconds)

    async def run(self) -> None:
        """Write frames until cancelled."""
        while True:
            await self._something.wait()
            self._something.clear()
            taken = [box.take(self._worker) for box in self._outboxes.values() if not box.is_empty]
            if taken:
                await self._write(
                    [(keys.replies(each.gateway), messages.encode(each.frame)) for each in taken]
                )
                self._on_written(
                    [report for each in taken for report in each.to_end],
                    [report for each in taken for report in each.to_hand_back],
                )
            if all(box.is_empty for box in self._outboxes.values()):
                self._nothing.set()
            else:
                self._something.set()

    async def _write(self, entries: list[Entry]) -> None:
        backoff = Backoff("write replies")
        number = len(entries)
        while entries:
            results = await self._send(entries)
            outcomes = list(zip(entries, results, strict=True))
            entries = [entry for entry, result in outcomes if isinstance(result, Exception)]
            errors = [result for result in results if isinstance(result, Exception)]
            if errors:
                telemetry.REPLY_WRITE_FAILURES.inc()
                self._check_overflow()
                await backoff.pause(errors[0])
        backoff.recovered()
        telemetry.FRAMES_WRITTEN.inc(number)

    async def _send(self, entries: list[Entry]) -> list[Any]:
        try:
            async with self._redis.pipeline(transaction=False) as pipeline:
                for key, payload in entries:
                    pipeline.execute_command(
                        "XADD", key, "MAXLEN", "~", MOST_FRAMES_KEPT, "*", "f", payload
                    )
                return await pipeline.execute(raise_on_error=False)
        except (RedisError, OSError) as error:
            return [error] * len(entries)

    def _check_overflow(self) -> None:
        pending = sum(len(box.deltas) for box in self._outboxes.values())
        if pending > self._most_pending_deltas and self.on_overflow is not None:
            self.on_overflow()
