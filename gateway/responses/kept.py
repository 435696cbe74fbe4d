"""Kept answer: an answer that this process owns, journals and reports to followers."""

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Final, Protocol

from redis.exceptions import RedisError
from typing_extensions import override

from contract import clock
from contract.messages import Delta, Follow, JobFailed, JobFinished
from contract.outcomes import FailureCode
from gateway.dispatch.dispatcher import Dispatcher
from gateway.dispatch.generation import JobMessage
from gateway.responses.entries import Received, encode_entries
from gateway.responses.head import ResponseHead
from gateway.responses.settlement import Keeper, Settlement, SettlementDesk
from gateway.responses.store import Appended, ResponseState, ResponseStore, Standing
from gateway.stream.failures import to_api_error
from gateway.tenancy.usage_record import Counts, Outcome, UsageRecord

FOLLOWED_SECONDS: Final = 6.0
"""How long a follower counts without repeating its notice, which it sends every two seconds."""
LIVE_GRACE_MS: Final = 60_000
"""How much longer than its deadline an answer that does not end is kept."""
GIVE_UP_SECONDS: Final = 600.0
"""How long writing the end of an answer is retried."""
CANCELLED_CODE: Final = "cancelled"
_NOT_ITS_OWN: Final = (FailureCode.TAKEN_OVER, FailureCode.GATEWAY_STOPPING)
"""Failures after which another gateway can resume the answer."""

logger = logging.getLogger(__name__)


class Office(Protocol):
    """What kept answers share: the part of `Responses` that they use."""

    store: ResponseStore
    dispatcher: Dispatcher
    desk: SettlementDesk

    def tell(self, gateway: str, handle: int) -> None:
        """Notify a follower that its answer has grown."""

    def is_over(self, kept: "KeptResponse") -> None:
        """Stop keeping an answer that has ended or is lost."""


class KeptResponse(Keeper):
    """One answer from its beginning or takeover until its end."""

    def __init__(
        self,
        office: Office,
        head: ResponseHead,
        settlement: Settlement,
        *,
        term: int,
        standing: Standing,
        entries: Sequence[bytes] = (),
        has_consumer: bool,
    ) -> None:
        self.head = head
        self.settlement = settlement
        self.generation = settlement.generation
        self.term = term
        self.has_ended = False
        self._office = office
        self._standing = standing
        self._entries = list(entries)
        """The whole journal, from which it is restored if Redis loses it."""
        self._pending: list[tuple[int, JobMessage]] = []
        """Messages received since the last entry."""
        self._written: int | None = len(entries) if term > 1 else None
        """Entries stored in Redis; None if Redis may not have the answer at all."""
        self._told: Standing | None = None
        self._followers: dict[tuple[str, int], float] = {}
        self._has_consumer = has_consumer
        # The reader that caused a takeover sends its first follow notice soon.
        self._wanted_until = 0.0 if has_consumer else time.monotonic() + FOLLOWED_SECONDS
        self._unfinished = len(head.jobs)
        self._failure: JobFailed | None = None
        self._is_cancelled = False
        self._is_lost = False
        self._is_stopping = False
        self._ended_at = 0.0
        self._lock = asyncio.Lock()
        self._is_flushing = False
        settlement.keep(self)
        self.generation.on_reply = self.on_reply

    # -- replies ---------------------------------------------------------------------------------

    def on_reply(self, prompt_index: int, message: JobMessage) -> None:
        """Record a reply that was accepted."""
        if self.has_ended:
            return
        if type(message) is not Delta:
            self._on_rare_reply(prompt_index, message)
            return
        self._pending.append((prompt_index, message))
        if self._followers:
            self.flush_soon()

    def _on_rare_reply(self, prompt_index: int, message: JobMessage) -> None:
        if isinstance(message, JobFailed) and message.code in _NOT_ITS_OWN:
            self._stop(message.code)
            return
        self._pending.append((prompt_index, message))
        if self._followers:
            self.flush_soon()
        if isinstance(message, JobFinished):
            self._unfinished -= 1
        elif isinstance(message, JobFailed):
            self._failure = self._failure or message
        if not self._has_consumer:
            self._end_if_over()

    def recall(self, received: Sequence[Received], *, unread: Sequence[Received]) -> None:
        """Apply messages from before the takeover; `unread` are those missing from the journal."""
        for _, message in received:
            if isinstance(message, JobFinished):
                self._unfinished -= 1
            elif isinstance(message, JobFailed):
                self._failure = self._failure or message
        self._pending += unread

    def has_begun(self, handles: tuple[int, ...]) -> None:
        """Record the handles of its jobs. If all jobs have ended, end the answer."""
        self._standing = self._standing._replace(handles=handles)
        self.flush_soon()
        self._end_if_over()

    def _end_if_over(self) -> None:
        """Settle an ended answer that has no consumer here."""
        if self._failure is not None:
            self.settlement.fail(to_api_error(self._failure))
        elif self._unfinished == 0:
            self._office.desk.start(self.settlement.finish())

    # -- readers ---------------------------------------------------------------------------------

    @property
    def is_to_go_on(self) -> bool:
        """Whether it ended because of a slow reader, although it runs in the background."""
        is_left = self._standing.state is ResponseState.LEFT and not self._is_lost
        return is_left and self.head.is_background

    def follow(self, follow: Follow) -> None:
        """Notify a follower of new messages for some seconds, or stop if `follow.is_over`."""
        follower = (follow.gateway, follow.handle)
        if follow.is_over:
            self._followers.pop(follower, None)
            self._wanted_until = 0.0
            self.look_around()
            return
        is_new = follower not in self._followers
        self._followers[follower] = time.monotonic() + FOLLOWED_SECONDS
        if is_new:
            # The follower may have read just before the latest entry was written.
            self._office.desk.start(self._flush_and_tell())

    def leave(self, code: str = "") -> None:
        """Note that the client that began the request has disconnected."""
        self._has_consumer = False
        self.generation.detach()
        self.look_around(code)
        self._end_if_over()

    def look_around(self, code: str = "") -> None:
        """End the answer if no client wants it any more."""
        now = time.monotonic()
        self._followers = {
            follower: until for follower, until in self._followers.items() if until > now
        }
        is_wanted = (
            self._has_consumer
            or self.head.is_background
            or bool(self._followers)
            or self._wanted_until > now
        )
        if not is_wanted and self._unfinished and self._failure is None:
            self.settlement.end(Outcome.CANCELLED, code)

    def cancel(self) -> None:
        """Cancel the answer, even if clients read it."""
        if self.settlement.has_ended:
            return
        self._is_cancelled = True
        self.settlement.end(Outcome.CANCELLED, CANCELLED_CODE)
        self.generation.push(0, JobFailed(0, 0, FailureCode.CANCELLED, ""))

    def hand_over(self) -> None:
        """Leave the answer to the gateway that takes it over, because this one stops."""
        if not self.settlement.has_ended:
            self._is_stopping = True
            self._office.dispatcher.give_up(self.generation)
            self.settlement.hand_over()

    @property
    def stored_bytes(self) -> int:
        """Approximate bytes stored in Redis: its request and its journal."""
        return self.head.stored_bytes + sum(map(len, self._entries))

    @property
    def has_consumer(self) -> bool:
        """Whether the client that began the request still waits for it here."""
        return self._has_consumer

    async def discard(self) -> None:
        """Delete an answer whose jobs were not enqueued."""
        self.has_ended = self._is_lost = True
        async with self._lock:
            try:
                await self._office.store.discard(self.head.request_id)
            except RedisError as error:
                logger.warning("cannot forget an answer now: %s", type(error).__name__)

    # -- end -------------------------------------------------------------------------------------

    @override
    def ending(self, outcome: Outcome) -> None:
        match outcome:
            case Outcome.FINISHED:
                self._end(ResponseState.FINISHED)
            case Outcome.CANCELLED if self._is_cancelled:
                self._fail_readers(FailureCode.CANCELLED)
                self._end(ResponseState.CANCELLED)
            case _ if outcome is Outcome.CANCELLED or self._is_stopping:
                pass  # It may resume after its settlement.
            case Outcome.TIMED_OUT:
                self._fail_readers(FailureCode.DEADLINE_EXCEEDED)
                self._end(ResponseState.FAILED)
            case _:
                self._fail_readers(FailureCode.ENGINE_ERROR)
                self._end(ResponseState.FAILED)

    @override
    async def may_settle(self) -> bool:
        await self.flush()
        return not self._is_lost

    @override
    def settled(self, record: UsageRecord) -> None:
        if not self.has_ended:
            before = self._standing.settled
            settled = Counts(
                before.prompt_tokens + record.prompt_tokens,
                before.cached_tokens + record.cached_tokens,
                before.completion_tokens + record.completion_tokens,
            )
            self._standing = self._standing._replace(settled=settled)
            self._end(ResponseState.LEFT)

    def _fail_readers(self, code: FailureCode) -> None:
        if self._failure is None:
            self._failure = JobFailed(0, 0, code, "")
            self._pending.append((0, self._failure))

    def _end(self, state: ResponseState) -> None:
        self.has_ended = True
        self._ended_at = time.monotonic()
        self._standing = self._standing._replace(state=state)
        self.flush_soon()

    def _stop(self, code: FailureCode) -> None:
        """Stop following the answer, although it has not failed."""
        if code is FailureCode.TAKEN_OVER and not self._is_stopping:
            self._lose()
            return
        self._is_stopping = True
        if not self._has_consumer:
            self.hand_over()

    def _lose(self) -> None:
        """Stop all work on an answer that another gateway has taken over."""
        if self._is_lost:
            return
        self._is_lost = self.has_ended = True
        logger.warning("answer %s was taken over by another gateway", self.head.request_id)
        self._office.dispatcher.give_up(self.generation)
        if not self.settlement.has_ended:
            self.settlement.hand_over()
        self._office.is_over(self)

    # -- writing ---------------------------------------------------------------------------------

    @property
    def has_news(self) -> bool:
        """Whether there is anything to write."""
        return bool(
            self._pending
            or self._written is None
            or self._written < len(self._entries)
            or self._told != self._standing
        )

    def flush_soon(self) -> None:
        """Write pending messages in the next turn of the event loop."""
        if not self._is_flushing:
            self._is_flushing = True
            self._office.desk.start(self.flush())

    async def flush(self) -> None:
        """Write pending messages. If Redis fails, they wait for the next flush."""
        async with self._lock:
            self._is_flushing = False
            while self.has_news and not self._is_lost:
                try:
                    if not await self._write():
                        return
                except RedisError as error:
                    logger.warning("cannot write a journal now: %s", type(error).__name__)
                    break
                self._tell_followers()
        if self.has_ended and (not self.has_news or self._has_given_up()):
            self._office.is_over(self)

    async def _flush_and_tell(self) -> None:
        await self.flush()
        self._tell_followers()

    async def _write(self) -> bool:
        """Write everything. Return False if another gateway has taken the answer over."""
        office, standing = self._office, self._standing
        if self._pending:
            through = office.dispatcher.last_entry.decode()
            self._entries += encode_entries(self._pending, through)
            self._pending = []
        entries = len(self._entries)
        if self._written is None:
            appended = await self._open(standing)
        else:
            appended = await office.store.append(
                self.head.request_id,
                term=self.term,
                index=self._written,
                entries=self._entries[self._written :],
                standing=standing,
                live_ms=self._live_ms(),
            )
        if appended is Appended.ANOTHERS:
            self._lose()
            return False
        if appended is Appended.LOST:
            # Send a heartbeat first: a stored answer without its owner's heartbeat is taken over.
            await office.dispatcher.beat()
            self._written = None
            return True
        self._written, self._told = entries, standing
        return True

    async def _open(self, standing: Standing) -> Appended:
        is_open = await self._office.store.open(
            self.head,
            owner=self._office.dispatcher.gateway,
            term=self.term,
            standing=standing,
            live_ms=self._live_ms(),
            entries=self._entries,
        )
        return Appended.DONE if is_open else Appended.ANOTHERS

    def _live_ms(self) -> int:
        if self.has_ended:
            return self.head.retention_ms
        deadline_ms = max(job.deadline_ms for job in self.head.jobs)
        left_ms = max(deadline_ms - clock.now_ms(), 0)
        return left_ms + LIVE_GRACE_MS + self.head.retention_ms

    def _has_given_up(self) -> bool:
        return time.monotonic() > self._ended_at + GIVE_UP_SECONDS

    def _tell_followers(self) -> None:
        for gateway, handle in self._followers:
            self._office.tell(gateway, handle)
