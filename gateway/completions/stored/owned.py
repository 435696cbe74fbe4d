"""Owned responses: this gateway generates them, stores them, and notifies their readers."""

import asyncio
import logging
import math
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import KW_ONLY, dataclass, field
from enum import Enum, auto
from typing import Any, Final

import msgspec
from redis.exceptions import RedisError

from common import clock
from common.tasks import each_apart, tolerating_outage, wait_for_end
from contract.messages import Delta, Follow, JobFailed, JobFinished, JobMessage
from contract.outcomes import FailureCode
from gateway.completions.queue.dispatcher import Dispatcher
from gateway.completions.queue.reader import entry_id_of
from gateway.completions.rendering.failures import to_api_error
from gateway.completions.settlement import CANCELLED_CODE, Ending, Settlement, SettlementService
from gateway.completions.stored.head import ResponseHead
from gateway.completions.stored.journal import (
    MESSAGES_OF_ENTRY,
    Received,
    encode_entries,
    encode_message,
)
from gateway.completions.stored.peers import BackgroundIndex, Peers
from gateway.completions.stored.store import (
    DEADLINE_GRACE_MS,
    ResponseStore,
    WriteResult,
    bytes_of_head,
    packed_head,
)
from gateway.limits.replies import RequestState
from gateway.limits.reservations import CONFIRMED_SECONDS
from gateway.limits.stored_bytes import SMALL_BYTES, Holder, allocated
from gateway.records.errors import RateLimitError, StoreUnavailableError
from gateway.records.usage_record import Outcome

FOLLOWED_SECONDS: Final = 6.0
"""How long a follower counts without repeating its notice, which it sends every two seconds."""
GIVE_UP_SECONDS: Final = 600.0
"""How long writing the end of a response is retried."""
WRITE_SECONDS: Final = 0.25
"""How often the journal of a finished response in the background is written until Redis has it."""
UNWRITTEN_SECONDS: Final = 12.0
"""How long a response with few new messages waits for its next write.

Until then, they are only in this gateway's reply stream, which keeps frames for 30 seconds
(`worker.queue.replies`). Eleven of them may pass between the death of this gateway and the last
frame.
"""
TRIM_BYTES: Final = 8_388_608
"""Bytes of replies after which all journals are written, so that these replies can be removed.

Workers remove replies after 30 seconds, which may be hundreds of megabytes.
"""
TAKEOVER_SECONDS: Final = 60.0
"""How long no reply is removed after another gateway may have begun to take a response over."""
MOST_ENDED: Final = 1_000
"""Ended responses in the background that are kept for `CONFIRMED_SECONDS`, to be written again."""
MAX_CONCURRENT_WRITES: Final = 200
"""Responses that are written at once: some may wait for a server that does not respond."""
_RESUMABLE: Final = (FailureCode.TAKEN_OVER, FailureCode.GATEWAY_STOPPING)
"""Failures after which another gateway can resume the response."""

logger = logging.getLogger(__name__)


class OwnedState(Enum):
    """State of a response at the gateway that owns it."""

    RUNNING = auto()
    STOPPING = auto()
    """This gateway stops; another one can resume the response."""
    ENDING = auto()
    """It has failed or was cancelled, and is being settled: no output is added."""
    ENDED = auto()
    """It is settled. Redis may lack a part of its journal."""
    LOST = auto()
    """Another gateway owns it, or it was deleted: nothing is written any more."""


RUNNING, STOPPING, ENDING, ENDED, LOST = OwnedState
_OVER: Final = (ENDED, LOST)
_CLOSED: Final = (ENDING, *_OVER)
"""States in which no output is added."""
_NEXT: Final[dict[OwnedState, tuple[OwnedState, ...]]] = {
    RUNNING: (STOPPING, ENDING, ENDED, LOST),
    STOPPING: (STOPPING, ENDING, ENDED, LOST),
    ENDING: (ENDED, LOST),
    ENDED: (LOST,),
    LOST: (),
}


@dataclass(eq=False)
class OwnedResponses:
    """The responses that this gateway owns, until they have ended or another gateway owns them."""

    store: ResponseStore
    peers: Peers
    background: BackgroundIndex
    dispatcher: Dispatcher
    settlements: SettlementService
    keep: Callable[["OwnedResponse"], Awaitable[None]]
    """Keeps a finished response for later requests, if its request wants that."""
    log: Callable[[ResponseHead, Sequence[bytes], Outcome], Coroutine[Any, Any, None]]
    """Logs the end of a response whose request has a `prompt_log`, with its whole journal."""

    def __post_init__(self) -> None:
        self.tasks = self.settlements.tasks
        self.by_id: dict[str, OwnedResponse] = {}
        self.interrupted: asyncio.Queue[tuple[str, str]] = asyncio.Queue()
        """Background responses that a slow reader has ended, and must resume: tenant and id."""
        self._ended: OrderedDict[str, OwnedResponse] = OrderedDict()
        """Responses in the background that have just ended."""
        self._outages = self.dispatcher.presence.outages
        self._trimmed_bytes = 0
        """`ReplyReader.read_bytes` when the reply stream was last trimmed."""
        self._trims_after = -math.inf

    def of(self, settlement: Settlement) -> "OwnedResponse | None":
        """Return the response that has this settlement; None if it is not stored, or has ended."""
        response = self.by_id.get(settlement.record.request_id)
        return response if response is not None and response.settlement is settlement else None

    def add(self, response: "OwnedResponse") -> None:
        """Add a response that begins, or that was taken over."""
        self.by_id[response.head.request_id] = response
        if response.head.is_background:
            self.background.add(response.head.tenant_id, response.head.request_id)

    def remove(self, response: "OwnedResponse") -> None:
        """Remove a response that has ended, or that another gateway owns. Safe to repeat."""
        head = response.head
        if self.by_id.get(head.request_id) is not response:
            return
        del self.by_id[head.request_id]
        if response.must_resume:
            self.interrupted.put_nowait((head.tenant_id, head.request_id))
        elif head.is_background:
            self.background.remove(head.tenant_id, head.request_id)
            if not (head.record.line or response.is_lost):
                self._ended[head.request_id] = response
                if len(self._ended) > MOST_ENDED:
                    self._ended.popitem(last=False)

    def forget(self, request_id: str) -> None:
        """Do not write an ended response again, because it is deleted."""
        self._ended.pop(request_id, None)

    def discard(self, request_id: str) -> asyncio.Task[Any] | None:
        """Delete a response whose jobs were not enqueued, in a task; None if it is not owned."""
        response = self.by_id.pop(request_id, None)
        if response is None:
            return None
        self.background.remove(response.head.tenant_id, request_id)
        return self.tasks.task(response.discard())

    async def check(self) -> None:
        """End the responses that no client reads, and write those whose messages are due.

        If Redis was replaced, it may have lost any of them: all are written.
        """
        now = time.monotonic()
        while self._ended and next(iter(self._ended.values())).age(now) > CONFIRMED_SECONDS:
            self._ended.popitem(last=False)
        if (outages := self.dispatcher.presence.outages) != self._outages:
            self._outages = outages
            # Until they are written: the next server may be away again.
            for request_id, ended in self._ended.items():
                self.by_id.setdefault(request_id, ended)
            for response in self.by_id.values():
                response.mark_unwritten()
        responses = list(self.by_id.values())
        if self.dispatcher.presence.is_steady:  # If not, follow notices could not arrive.
            for response in responses:
                response.end_if_abandoned(is_silent=True)
        read_bytes = self.dispatcher.reader.read_bytes
        is_due = self.settlements.trims_replies or read_bytes - self._trimmed_bytes > TRIM_BYTES
        trims = is_due and now > self._trims_after
        await self._write([each for each in responses if trims or each.is_write_due(now)])
        if trims and now > self._trims_after:
            self.settlements.trims_replies = False
            await self._trim()
            self._trimmed_bytes = read_bytes

    def keep_replies(self) -> None:
        """Keep the reply stream for a gateway that takes a response over."""
        self._trims_after = time.monotonic() + TAKEOVER_SECONDS

    async def _trim(self) -> None:
        """Remove the replies that all journals have."""
        unwritten = [each.through for each in self.by_id.values() if each.needs_write]
        milliseconds, number = entry_id_of(self.dispatcher.reader.last_entry)
        following = b"%d-%d" % (milliseconds, number + 1)
        with tolerating_outage("trim the reply stream"):
            await self.dispatcher.trim_replies(min((following, *unwritten), key=entry_id_of))

    async def write(self) -> None:
        """Write the new messages of all responses."""
        await self._write([each for each in self.by_id.values() if each.needs_write])

    async def _write(self, responses: list["OwnedResponse"]) -> None:
        await each_apart(OwnedResponse.write, responses, at_once=MAX_CONCURRENT_WRITES)


@dataclass(eq=False)
class OwnedResponse:
    """One response from its beginning or takeover until its end. It drives its settlement."""

    _owned: OwnedResponses
    head: ResponseHead
    _head_bytes: int
    _packed: bytes
    """The head as it is stored; empty as soon as Redis has it."""
    settlement: Settlement
    term: int
    _handles: tuple[int, ...]
    """Of the jobs that this gateway follows."""
    _counted: int = 0
    """Bytes in Redis that count towards the limits of the tenant."""
    _: KW_ONLY
    has_consumer: bool
    """Whether the client that began the request still waits for it here."""
    entries: list[bytes] = field(default_factory=list)
    """The whole journal, from which it is restored if Redis loses it."""

    def __post_init__(self) -> None:
        self.generation = self.settlement.generation
        self.holder = Holder(self.head.tenant_id, self.head.subjects, self.head.request_id)
        self._pending: list[msgspec.Raw] = []
        """Messages received since the last entry."""
        self._written: int | None = len(self.entries) if self.term > 1 else None
        """Entries stored in Redis; None if Redis may not have the response at all."""
        self._written_handles: tuple[int, ...] | None = None
        self._is_end_written = False
        """Whether Redis keeps the content as long as it keeps ended responses."""
        self._followers: dict[tuple[str, int], float] = {}
        # The reader that caused a takeover sends its first follow notice soon.
        self._wanted_until = 0.0 if self.has_consumer else time.monotonic() + FOLLOWED_SECONDS
        self._unfinished = len(self.head.jobs)
        self._failure: JobFailed | None = None
        self._state = RUNNING
        self._ended_as: RequestState | None = None
        self._is_deleted = False
        """Whether a client has deleted it, perhaps before it is settled."""
        self._is_silent = False
        """Whether it ended because its followers were silent, and not because clients left."""
        self._is_unanswered = False
        """Whether its client got an error without a failure of its jobs, and may have repeated the
        request: it resumes if a client asks for it."""
        self._ended_at = 0.0
        self._lock = asyncio.Lock()
        self._finish_lock = asyncio.Lock()
        self._is_writing_soon = False
        self._written_at = time.monotonic()
        self._entry_bytes = allocated(map(len, self.entries))
        self.through = self._owned.dispatcher.reader.last_entry
        """The last entry of the reply stream whose messages the stored journal has."""
        self.generation.on_reply = self.on_reply
        self.generation.journal = self._pending

    @property
    def is_stored(self) -> bool:
        """Whether other gateways can find it in Redis, unless Redis has lost it since."""
        return self._written is not None or self._state is LOST

    @property
    def is_lost(self) -> bool:
        """Whether another gateway owns it, or it was deleted."""
        return self._state is LOST

    def age(self, now: float) -> float:
        """Return the seconds since it has ended; `now` is a time of `time.monotonic`."""
        return now - self._ended_at

    def mark_unwritten(self) -> None:
        """Write again, and everything if Redis has lost it."""
        self._written_handles = None

    # -- replies ---------------------------------------------------------------------------------

    def on_reply(self, prompt_index: int, message: JobMessage) -> None:
        """Record a reply that was accepted."""
        if self._state in _CLOSED:
            return
        if type(message) is not Delta:
            self._on_rare_reply(prompt_index, message)
            return
        self._pending.append(encode_message(prompt_index, message))
        if self._followers:
            self.write_soon()

    def _on_rare_reply(self, prompt_index: int, message: JobMessage) -> None:
        if isinstance(message, JobFailed) and message.code in _RESUMABLE:
            self._stop(message.code)
            return
        self._pending.append(encode_message(prompt_index, message))
        if self._followers:
            self.write_soon()
        self._count_end(message)
        if not self.has_consumer:
            self._end_if_complete()

    def restore(self, received: Sequence[Received], *, unread: Sequence[Received]) -> None:
        """Apply messages from before the takeover; `unread` are those missing from the journal."""
        for _, message in received:
            self._count_end(message)
        self._pending += [encode_message(*each) for each in unread]

    def _count_end(self, message: JobMessage) -> None:
        if isinstance(message, JobFinished):
            self._unfinished -= 1
        elif isinstance(message, JobFailed):
            self._failure = self._failure or message

    def set_handles(self, handles: tuple[int, ...]) -> None:
        """Record the handles of its jobs. If all jobs have ended, end the response."""
        self._handles = handles
        self.write_soon()
        self._end_if_complete()

    def _end_if_complete(self) -> None:
        """Settle a complete response that has no consumer here."""
        if self._failure is not None:
            self.end(Ending.of_error(to_api_error(self._failure)))
        elif self._unfinished == 0:
            self._owned.tasks.start(self.finish())

    def _enter(self, state: OwnedState) -> None:
        """Enter a state. What comes after a later state, such as a late notice, changes nothing."""
        if state in _NEXT[self._state]:
            self._state = state

    # -- readers ---------------------------------------------------------------------------------

    @property
    def must_resume(self) -> bool:
        """Whether it ended because of a slow reader, although it runs in the background."""
        is_paused = self._ended_as is RequestState.PAUSED and self._state is not LOST
        return is_paused and self.head.is_background and not self._is_unanswered

    def follow(self, follow: Follow) -> None:
        """Notify a follower of new messages for some seconds, or stop if `follow.is_over`."""
        follower = (follow.gateway, follow.handle)
        if follow.is_over:
            self._followers.pop(follower, None)
            self._wanted_until = 0.0
            self.end_if_abandoned()
            return
        is_new = follower not in self._followers
        self._followers[follower] = time.monotonic() + FOLLOWED_SECONDS
        if is_new:
            # The fast path (`Generation.take`) does not notify followers.
            self.generation.forbid_take()
            # The follower may have read just before the latest entry was written.
            self._owned.tasks.start(self._write_and_notify())

    def leave(self) -> None:
        """Record that the client that began the request has disconnected.

        If no other client reads the response, its jobs stop and it is settled as cancelled;
        otherwise it continues. To run a background response without a client, call this as soon as
        its jobs are enqueued.
        """
        self.has_consumer = False
        self.generation.detach()
        self.end_if_abandoned()
        self._end_if_complete()

    def end_if_abandoned(self, *, is_silent: bool = False) -> None:
        """End the response if no client reads it, unless it runs in the background.

        If `is_silent`, its followers may have failed while their clients wait. Then the tenant does
        not pay again for prompts that are read again.
        """
        if self.has_consumer and not self._followers:
            return
        now = time.monotonic()
        self._followers = {
            follower: until for follower, until in self._followers.items() if until > now
        }
        is_wanted = (
            self.has_consumer
            or self.head.is_background
            or bool(self._followers)
            or self._wanted_until > now
        )
        if not is_wanted and self._unfinished and self._failure is None:
            self.end(Ending(Outcome.CANCELLED, is_temporary=True), is_silent=is_silent)

    # -- end -------------------------------------------------------------------------------------

    def cancel(self) -> None:
        """Cancel the response, even if clients read it."""
        if self.settlement.begin_end():
            self._fail(FailureCode.CANCELLED)
            ending = Ending(Outcome.CANCELLED, CANCELLED_CODE)
            self._owned.tasks.start(self._settle(ending, RequestState.CANCELLED))
            self.generation.push(0, JobFailed(0, 0, FailureCode.CANCELLED, ""))

    async def finish(self) -> None:
        """Settle a response whose jobs have all finished, once its journal is complete.

        So whoever finds it finished can read it to its end. It ends when its settlement is
        confirmed: until then, the gateway that takes the response over settles it. A line of a
        batch waits for both, and another response in the background for its journal: if its
        gateway died between the two, nothing would write the end. Otherwise this waits for each as
        long as `Settlement.finish`: the client receives the response from this gateway.
        """
        async with self._finish_lock:
            is_line = bool(self.head.record.line)
            waits_for_journal = is_line or self.head.is_background
            while self.needs_write and not self.settlement.has_ended:
                writing = self._owned.tasks.task(self.write())
                await wait_for_end(writing, timeout_seconds=WRITE_SECONDS)
                if not waits_for_journal:
                    break
                if self.needs_write:
                    await asyncio.sleep(WRITE_SECONDS)
            if self.settlement.has_ended:
                return
            if not (self.has_consumer or is_line):
                await self._owned.keep(self)
            await self.settlement.finish(RequestState.FINISHED, stored_bytes=self._bytes_at_end)
            self._log(Outcome.FINISHED)
            if is_line or self.settlement.is_confirmed:
                await self._end_when_confirmed()
            else:
                self._owned.tasks.start(self._end_when_confirmed())

    async def _end_when_confirmed(self) -> None:
        await self.settlement.confirmed()
        self._end(RequestState.FINISHED)

    def fail(self, error: BaseException) -> None:
        """Settle a response that ends with an error, in the background."""
        self.end(Ending.of_error(error))

    def end(self, ending: Ending, *, is_silent: bool = False) -> None:
        """Settle a response that ends in any other way, in the background."""
        if not self.settlement.begin_end():
            return
        self._is_silent = is_silent
        self._is_unanswered = ending.is_temporary and self._failure is None
        is_left = ending.outcome is Outcome.CANCELLED or self._is_unanswered
        state = RequestState.PAUSED  # It may resume after its settlement.
        if not is_left and self._state is not STOPPING:
            is_late = ending.outcome is Outcome.TIMED_OUT
            self._fail(FailureCode.DEADLINE_EXCEEDED if is_late else FailureCode.ENGINE_ERROR)
            state = RequestState.FAILED
        self._owned.tasks.start(self._settle(ending, state))

    def hand_over(self) -> None:
        """Leave the response to the gateway that takes it over, because this one stops."""
        if not self.settlement.has_ended:
            self._enter(STOPPING)
            self._owned.keep_replies()
            self._owned.dispatcher.give_up(self.generation)
            self.settlement.hand_over()

    async def discard(self) -> None:
        """Delete a response whose jobs were not enqueued."""
        self._enter(LOST)
        async with self._lock:
            with tolerating_outage("delete a response"):
                await self._owned.store.discard(self.head.request_id)

    async def _settle(self, ending: Ending, state: RequestState) -> None:
        if state is RequestState.PAUSED:
            await self.write()
        else:
            await asyncio.gather(self.write(), self._show(state))
        if self._state is LOST and not self._is_deleted:
            # The gateway that has taken it over settles it.
            self.settlement.hand_over()
            return
        self._log(ending.outcome)
        # If a client that has left resumes it, the engine reads the prompts again and the tenant
        # pays.
        is_left = not (self._is_silent or ending.is_our_fault)
        await self.settlement.settle(
            ending, state, stored_bytes=self._bytes_at_end, reads_again=is_left
        )
        self._end(state)

    def _log(self, outcome: Outcome) -> None:
        if "prompt_log" in self.head.request:
            entries = [*self.entries, *encode_entries(self._pending, "")]
            self._owned.tasks.start(self._owned.log(self.head, entries, outcome))

    async def _show(self, state: RequestState) -> None:
        """Show it as ended before it is settled: a worker may not report its counts for a while."""
        with tolerating_outage("show the end of a response"):
            await self._owned.store.stop(self.head, self.term, state)

    def _fail(self, code: FailureCode) -> None:
        """Add no output; readers receive the failure, unless a job has failed before."""
        if self._failure is None:
            self._failure = JobFailed(0, 0, code, "")
            self._pending.append(encode_message(0, self._failure))
        self._enter(ENDING)
        self.generation.forbid_take()

    def _end(self, state: RequestState) -> None:
        self._enter(ENDED)
        self.generation.forbid_take()
        self._ended_as, self._ended_at = state, time.monotonic()
        if state is RequestState.PAUSED:
            self._handles = ()  # The journal lacks no replies, if another gateway resumes it.
        self.write_soon()

    def _stop(self, code: FailureCode) -> None:
        """Stop generating the response, although it has not failed."""
        if code is FailureCode.TAKEN_OVER and self._state is not STOPPING:
            self._lose()
            return
        self._enter(STOPPING)
        if not self.has_consumer:
            self.hand_over()

    def _lose(self) -> None:
        """Stop all work on a response that another gateway has taken over."""
        if self._state is LOST:
            return
        self._enter(LOST)
        self.generation.forbid_take()
        if not self._is_deleted:
            logger.warning("another gateway took response %s over", self.head.request_id)
        self._owned.keep_replies()
        self._owned.dispatcher.give_up(self.generation)
        if not self.settlement.has_ended:
            self.settlement.hand_over()
        self._owned.remove(self)

    # -- writing ---------------------------------------------------------------------------------

    @property
    def stored_bytes(self) -> int:
        """Bytes that Redis stores for it while it runs: its jobs, its head and its journal."""
        return self.head.stored_bytes + self._head_bytes + self._entry_bytes

    @property
    def _bytes_at_end(self) -> int:
        """Bytes that Redis stores after its end.

        A line's response is deleted as soon as its result is stored.
        """
        return 0 if self.head.record.line else self._head_bytes + self._entry_bytes

    @property
    def _is_over(self) -> bool:
        """Whether no more messages follow."""
        return self._unfinished == 0 or self._state in _CLOSED

    @property
    def _has_written(self) -> bool:
        """Whether Redis has all entries, the handles, and the end if there is one."""
        return (
            self._written == len(self.entries)
            and self._written_handles == self._handles
            and (self._is_end_written or not self._is_over)
        )

    @property
    def needs_write(self) -> bool:
        """Whether Redis lacks messages, handles or the end."""
        return bool(self._pending) or not self._has_written

    def is_write_due(self, now: float) -> bool:
        """Whether to write now.

        A changed status is written at once. Messages alone wait until they fill an entry, or until
        UNWRITTEN_SECONDS pass. The first ones of a background response do not wait: until they are
        stored, its status is `queued`. No customer can read the status of a batch line.
        """
        if self._has_written and now - self._written_at < UNWRITTEN_SECONDS:
            has_status = self.head.is_background and not self.head.record.line
            begins = has_status and not self.entries
            return len(self._pending) >= (1 if begins else MESSAGES_OF_ENTRY)
        return self.needs_write

    def write_soon(self) -> None:
        """Write pending messages in the next turn of the event loop."""
        if not self._is_writing_soon:
            self._is_writing_soon = True
            self._owned.tasks.start(self.write())

    async def write(self) -> None:
        """Write pending messages. If Redis fails, they wait for the next write."""
        async with self._lock:
            self._is_writing_soon = False
            self._written_at = time.monotonic()
            while self.needs_write and self._state is not LOST:
                try:
                    if not await self._write():
                        return
                except RedisError as error:
                    logger.warning("cannot write a response: %s", type(error).__name__)
                    break
                self._notify_followers()
        is_overdue = time.monotonic() > self._ended_at + GIVE_UP_SECONDS
        if self._state in _OVER and (not self.needs_write or is_overdue):
            self._owned.remove(self)

    async def _write_and_notify(self) -> None:
        await self.write()
        self._notify_followers()

    async def _write(self) -> bool:
        """Write everything. Return False if another gateway has taken the response over."""
        owned, handles, is_over = self._owned, self._handles, self._is_over
        through = owned.dispatcher.reader.last_entry
        if self._pending:
            entries = encode_entries(self._pending, through.decode())
            self._pending.clear()
            self.entries += entries
            self._entry_bytes += allocated(map(len, entries))
        written = len(self.entries)
        if self._written is None and not self._packed:
            self._packed = await packed_head(self.head)
            self._head_bytes = bytes_of_head(self._packed)
        await self._count()
        if self._written is None:
            result = await owned.store.open(
                self.head.request_id,
                self._packed,
                term=self.term,
                gateway=owned.dispatcher.gateway,
                handles=handles,
                ttl_ms=self._ttl_ms(),
                entries=self.entries,
            )
        else:
            result = await owned.store.append(
                self.head.request_id,
                term=self.term,
                index=self._written,
                entries=self.entries[self._written :],
                gateway=owned.dispatcher.gateway,
                handles=handles,
                ttl_ms=self._ttl_ms(),
            )
        if result is WriteResult.NOT_OWNER or (
            result is WriteResult.MISSING and await self._is_gone()
        ):
            self._lose()
            return False
        if result is WriteResult.MISSING:
            # Send a heartbeat first: a stored response is taken over if its owner has none.
            await owned.dispatcher.beat()
            self._written, self.head = None, self.head.without_chunks()
            return True
        self._written, self._written_handles, self.through = written, handles, through
        self._is_end_written = is_over
        self._packed = b""
        return True

    async def _is_gone(self) -> bool:
        """Return whether a client has deleted the response, or another gateway owns it."""
        head = self.head
        found = await self._owned.store.status(head.tenant_id, head.request_id)
        self._is_deleted = found is not None and found.state is RequestState.DELETED
        return self._is_deleted or (found is not None and found.term != self.term)

    async def _count(self) -> None:
        """Count the stored bytes of a running response that has grown; end it above a limit."""
        size, head, storage = self.stored_bytes, self.head, self._owned.settlements.storage
        holder, before, live_ms = self.holder, self._counted, self._ttl_ms()
        if self._is_over or size - before < SMALL_BYTES:
            return
        try:
            if head.record.line:
                await storage.settle(holder, size, live_ms=live_ms)
            else:
                await storage.take(holder, size, live_ms=live_ms, before=before)
            self._counted = size
        except RateLimitError as error:
            if not self._is_over:
                failed = JobFailed(0, 0, FailureCode.STORED_BYTES, str(error))
                self.generation.push(0, failed)
        except StoreUnavailableError:
            pass  # Then Redis does not take the journal either.

    def _ttl_ms(self) -> int:
        if self._is_over:
            return self.head.retention_ms
        deadline_ms = max(job.deadline_ms for job in self.head.jobs)
        left_ms = max(deadline_ms - clock.now_ms(), 0)
        return left_ms + DEADLINE_GRACE_MS + self.head.retention_ms

    def _notify_followers(self) -> None:
        for gateway, handle in self._followers:
            self._owned.peers.notify_reader(gateway, handle)
