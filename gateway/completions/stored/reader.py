"""Response reader: read a response from its journal, whichever gateway owns it."""

import asyncio
import logging
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Final

from redis.exceptions import RedisError
from typing_extensions import override

from common.tasks import end_task, raise_if_cancelled
from contract.messages import Follow, JobFailed, JobFinished
from contract.outcomes import FailureCode
from gateway.completions.queue.generation import REPLIES_AT_ONCE, Generation, Reply, Take, Turn
from gateway.completions.rendering.completion import Completion
from gateway.completions.sealing import Sealer
from gateway.completions.stored.head import ResponseHead
from gateway.completions.stored.journal import Received, decode_slices
from gateway.completions.stored.peers import Peers
from gateway.completions.stored.store import ResponseStore
from gateway.completions.stored.takeover import Takeovers
from gateway.limits.replies import RequestState
from gateway.platform.concurrency.fair_turns import LoopTurns
from gateway.records.errors import ApiError, StoreUnavailableError

REPEAT_SECONDS: Final = 2.0
"""How often the owner is checked, and its follow notice is repeated."""
PAUSE_SECONDS: Final = 0.2
SETTLED_SECONDS: Final = 0.02
"""How often a whole response is checked until it is settled."""
MISSING_SECONDS: Final = 10.0
"""How long a response, its end or its record may be missing: after Redis loses one of them, the
owner writes it again."""
OVERDUE_SECONDS: Final = 60.0
"""How long after its deadline a response that does not end is still read."""

logger = logging.getLogger(__name__)


class ReplayedGeneration(Generation):
    """Delivers the messages of a journal, at the pace of the consumer."""

    def __init__(self, turn: Turn) -> None:
        super().__init__(max_unread_bytes=sys.maxsize, turn=turn)
        self._was_taken = asyncio.Event()

    @override
    def turn_for(self, replies: list[Reply]) -> AbstractAsyncContextManager[None]:
        return self.turn()

    @override
    async def replies(self, take: Take | None = None) -> list[Reply]:
        # Nothing is taken without a turn.
        del take
        taken = await super().replies()
        self._was_taken.set()
        return taken

    async def deliver(self, received: Sequence[Received]) -> None:
        """Deliver messages and wait until the consumer has taken them."""
        for start in range(0, len(received), REPLIES_AT_ONCE):
            self._was_taken.clear()
            for index, message in received[start : start + REPLIES_AT_ONCE]:
                self.push(index, message)
            while self._replies and not self._was_taken.is_set():
                await self._was_taken.wait()


@dataclass(eq=False)
class ResponseReader:
    """Reads a response from its beginning, then new messages as they arrive."""

    _head: ResponseHead
    _store: ResponseStore
    _takeovers: Takeovers
    _peers: Peers
    _gateway: str
    _loop_turns: LoopTurns
    _sealer: Sealer

    def __post_init__(self) -> None:
        head = self._head
        self.completion: Completion = head.completion(self._sealer)
        turn = partial(self._loop_turns.slice_of, head.tenant_id)
        self.generation = ReplayedGeneration(turn)
        """Delivers the same replies, in the same order, as the response's original generation.

        It does not overflow: a slow consumer only delays reading.
        """
        for index, job in enumerate(head.jobs):
            self.generation.expect(index, job)
        self._index = 0
        self._unfinished = len(head.jobs)
        self._has_failed = False
        self._cannot_resume = False
        self._owner = ""
        self._has_record = True
        """Whether Redis had the record of the request when it was last read."""
        self._state: RequestState | None = None
        """Its end, once known."""
        self._is_settled = False
        """Whether it is whole, and its last messages need not wait any more."""
        self._grown = asyncio.Event()
        self._must_look = asyncio.Event()
        self._handle = self._peers.add_reader(self._grown)
        # These tasks keep the response running even while the consumer takes nothing.
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._follow())]

    async def aclose(self) -> None:
        """Stop reading. A response without readers ends, unless it runs in the background."""
        self._peers.remove_reader(self._handle)
        for task in self._tasks:
            await end_task(task)
        # The cancelled tasks refer to this reader; such a cycle would wait for the collector.
        self._tasks.clear()
        if self._owner and not self._is_complete:
            self._notify_owner(is_over=True)

    @property
    def _is_complete(self) -> bool:
        return self._has_failed or self._is_settled

    # -- reading ---------------------------------------------------------------------------------

    async def _read(self) -> None:
        try:
            await self._read_all()
        except Exception:
            logger.exception("cannot read response %s", self._head.request_id)
            self._fail()

    async def _read_all(self) -> None:
        overdue_at = time.monotonic() + self._head.most_ms / 1000 + OVERDUE_SECONDS
        seen_at = time.monotonic()
        while not self._is_complete:
            if time.monotonic() > overdue_at:
                self._fail()
                return
            self._grown.clear()
            try:
                exists = await self._read_page()
                if not exists and time.monotonic() > seen_at + MISSING_SECONDS:
                    await self._give_up()
            except RedisError as error:
                logger.warning("cannot read a response: %s", type(error).__name__)
                exists = True  # Unknown.
                await asyncio.sleep(PAUSE_SECONDS)
            raise_if_cancelled()
            if exists:
                seen_at = time.monotonic()
            else:
                await asyncio.sleep(PAUSE_SECONDS)

    async def _read_page(self) -> bool:
        """Read the available entries, and wait for more after the last one.

        Returns False if Redis lacks the response, its record, or the end of one that has ended.
        """
        # Before the journal, which is complete once the response has ended.
        state = self._state
        page = await self._store.read_page(self._head.request_id, index=self._index)
        if page is None:
            return False
        self._owner = self._owner or page.gateway
        if not page.entries:
            # Its owner may have paused it, or ended it without a last entry.
            self._must_look.set()
        for entry in page.entries:
            await self._take(entry)
        if self._index < page.total_entries or self._is_complete:
            return True
        if self._cannot_resume or state is RequestState.DELETED:
            self._fail()
        elif state is not None:
            return False  # Its owner writes the end again, unless it has died.
        else:
            # A notice may get lost, so read again after a timeout.
            with suppress(TimeoutError):
                async with asyncio.timeout(REPEAT_SECONDS):
                    await self._grown.wait()
        return self._has_record

    async def _take(self, entry: bytes) -> None:
        self._index += 1
        slices = decode_slices(entry)
        while True:
            async with self.generation.turn():
                received = next(slices, None)
            if received is None:
                return
            for _, message in received:
                if isinstance(message, JobFinished):
                    self._unfinished -= 1
                elif isinstance(message, JobFailed):
                    self._has_failed = True
            if self._unfinished == 0 and not self._has_failed:
                await self._settled()
            await self.generation.deliver(received)

    async def _settled(self) -> None:
        """Wait until a whole response is settled, for at most MISSING_SECONDS.

        If its owner dies before, this gateway takes it over: a client that has the whole response
        finds it finished. The runner of a batch waits for lines itself. After the wait, the owner
        settles it later, or the sweep.
        """
        until = time.monotonic() + (0 if self._head.record.line else MISSING_SECONDS)
        while self._state is None and not self._cannot_resume and time.monotonic() < until:
            self._must_look.set()
            await asyncio.sleep(SETTLED_SECONDS)
        self._is_settled = True

    async def _give_up(self) -> None:
        """Stop reading what its owner does not write again, or cannot. Raises RedisError.

        The owner may continue a response without a record: the limits may not allow a new one.
        """
        if not await self._takeovers.is_written(self._head.request_id, self._owner):
            self._fail(FailureCode.OUTPUT_LOST)
        elif self._has_record:
            self._fail()

    def _fail(self, code: FailureCode = FailureCode.TAKEN_OVER) -> None:
        """Stop reading. By default, the response has not failed; a client can resume it later."""
        self._has_failed = True
        self.generation.push(0, JobFailed(0, 0, code, ""))

    # -- keeping it running ----------------------------------------------------------------------

    async def _follow(self) -> None:
        """Repeat the follow notice to the owner, and check that the owner is alive."""
        while not self._is_complete:
            self._must_look.clear()
            try:
                request_id, tenant_id = self._head.request_id, self._head.tenant_id
                status = await self._store.status(tenant_id, request_id)
                self._has_record = status is not None
                if status is not None and not status.state.is_end:
                    self._owner = await self._takeovers.keep_running(tenant_id, request_id, status)
                    self._notify_owner()
                elif status is not None and self._state is None:
                    self._owner, self._state = status.owner, status.state
                    self._grown.set()
            except RedisError as error:
                logger.warning("cannot follow a response: %s", type(error).__name__)
            except StoreUnavailableError:
                pass  # Redis is unavailable.
            except ApiError as error:
                # A limit prevents it from resuming now; its reader may retry later.
                logger.warning("response %s cannot resume: %s", self._head.request_id, error.code)
                self._cannot_resume = True
                self._grown.set()
                return
            raise_if_cancelled()
            with suppress(TimeoutError):
                async with asyncio.timeout(REPEAT_SECONDS):
                    await self._must_look.wait()

    def _notify_owner(self, *, is_over: bool = False) -> None:
        head = self._head
        follow = Follow(head.request_id, self._gateway, self._handle, is_over, head.tenant_id)
        self._takeovers.follow(self._owner, follow)
