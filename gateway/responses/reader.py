"""Response reader: read an answer from its journal, whichever gateway owns it."""

import asyncio
import logging
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, suppress
from functools import partial
from typing import Final, Protocol

from redis.exceptions import RedisError
from typing_extensions import override

from contract.messages import Follow, JobFailed, JobFinished
from contract.outcomes import FailureCode
from gateway.concurrency.fair_turns import LoopTurns
from gateway.concurrency.tasks import end_task, raise_if_cancelled
from gateway.dispatch.generation import REPLIES_AT_ONCE, Generation, Reply, Turn
from gateway.errors import ApiError, StoreUnavailableError
from gateway.responses.entries import Received, decode_slices
from gateway.responses.head import ResponseHead
from gateway.responses.store import ResponseState, ResponseStore, StoredResponse
from gateway.stream.completion import Completion

REPEAT_SECONDS: Final = 2.0
"""How often the owner is checked, and its follow notice is repeated."""
PAUSE_SECONDS: Final = 0.2
MISSING_SECONDS: Final = 10.0
"""How long an answer may be missing: after Redis loses it, its owner writes it again."""
OVERDUE_SECONDS: Final = 60.0
"""How long after its deadline an answer that does not end is still read."""

logger = logging.getLogger(__name__)


class Library(Protocol):
    """The part of `Responses` that readers use."""

    store: ResponseStore
    loop_turns: LoopTurns

    async def keep_running(self, response: StoredResponse) -> str:
        """Ensure that an answer has a live owner that follows its jobs; return that owner.

        Raises an ApiError if the answer cannot resume, and RedisError.
        """

    def follow(self, owner: str, follow: Follow) -> None:
        """Send a `Follow` to an owner."""

    def forget_reader(self, handle: int) -> None:
        """Remove a reader that was closed."""


class AttachedGeneration(Generation):
    """Delivers the messages that its reader has read, at the pace of the consumer."""

    def __init__(self, turn: Turn) -> None:
        super().__init__(max_unread_bytes=sys.maxsize, turn=turn)
        self._was_taken = asyncio.Event()

    @override
    def turn_for(self, replies: list[Reply]) -> AbstractAsyncContextManager[None]:
        return self.turn()

    @override
    async def replies(self) -> list[Reply]:
        taken = await super().replies()
        self._was_taken.set()
        return taken

    async def hand_over(self, received: Sequence[Received]) -> None:
        """Deliver messages and wait until the consumer has taken them."""
        for start in range(0, len(received), REPLIES_AT_ONCE):
            self._was_taken.clear()
            for index, message in received[start : start + REPLIES_AT_ONCE]:
                self.push(index, message)
            while self._replies and not self._was_taken.is_set():
                await self._was_taken.wait()


class Attachment:
    """A reader of an answer: everything from its beginning, then new messages as they arrive."""

    def __init__(self, library: Library, head: ResponseHead, *, gateway: str, handle: int) -> None:
        self.completion: Completion = head.completion()
        self.generation: Generation
        """Delivers the same replies, in the same order, as the answer's original generation.

        It does not overflow: a slow consumer only delays reading.
        """
        turn = partial(library.loop_turns.slice_of, head.tenant_id)
        self._attached = self.generation = AttachedGeneration(turn)
        for index, job in enumerate(head.jobs):
            self._attached.expect(index, job)
        self._library = library
        self._head = head
        self._gateway = gateway
        self._handle = handle
        self._index = 0
        self._unfinished = len(head.jobs)
        self._has_failed = False
        self._is_stuck = False
        self._owner = ""
        self._grown = asyncio.Event()
        self._is_left = asyncio.Event()
        # These tasks keep the answer running even while the consumer takes nothing.
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._follow())]

    def grown(self) -> None:
        """Note that there is more to read."""
        self._grown.set()

    async def aclose(self) -> None:
        """Stop reading. An answer without readers is ended, unless it is a background answer."""
        self._library.forget_reader(self._handle)
        for task in self._tasks:
            await end_task(task)
        # The cancelled tasks refer to this attachment; such a cycle would wait for the collector.
        self._tasks.clear()
        if self._owner and not self._is_complete:
            self._tell_owner(is_over=True)

    @property
    def _is_complete(self) -> bool:
        return self._has_failed or self._unfinished == 0

    # -- reading ---------------------------------------------------------------------------------

    async def _read(self) -> None:
        try:
            await self._read_all()
        except Exception:
            logger.exception("answer %s cannot be read", self._head.request_id)
            self._fail()

    async def _read_all(self) -> None:
        overdue_at = time.monotonic() + self._head.most_ms / 1000 + OVERDUE_SECONDS
        seen_at = time.monotonic()
        while not self._is_complete:
            if time.monotonic() > min(seen_at + MISSING_SECONDS, overdue_at):
                self._fail()
                return
            self._grown.clear()
            try:
                is_there = await self._read_page()
            except RedisError as error:
                logger.warning("cannot read an answer now: %s", type(error).__name__)
                is_there = True  # Unknown; assume that it exists.
                await asyncio.sleep(PAUSE_SECONDS)
            raise_if_cancelled()
            if is_there:
                seen_at = time.monotonic()
            else:
                await asyncio.sleep(PAUSE_SECONDS)

    async def _read_page(self) -> bool:
        """Read the available entries, and wait for more after the last one.

        Returns False if the answer is missing.
        """
        page = await self._library.store.read_page(self._head.request_id, index=self._index)
        if page is None:
            return False
        for entry in page.entries:
            await self._take(entry)
        if self._index >= page.entries_in_all and not self._is_complete:
            await self._wait_for_more(page.standing.state)
        return True

    async def _take(self, entry: bytes) -> None:
        self._index += 1
        slices = decode_slices(entry)
        while True:
            async with self._attached.turn():
                received = next(slices, None)
            if received is None:
                return
            for _, message in received:
                if isinstance(message, JobFinished):
                    self._unfinished -= 1
                elif isinstance(message, JobFailed):
                    self._has_failed = True
            await self._attached.hand_over(received)

    async def _wait_for_more(self, state: ResponseState) -> None:
        if state.is_end:
            # The last journal entry contains the end; if it is missing, something went wrong.
            self._fail()
        elif self._is_stuck:
            self._fail()
        else:
            if state is ResponseState.LEFT:
                self._is_left.set()
            # A notice may get lost, so read again after a timeout.
            with suppress(TimeoutError):
                async with asyncio.timeout(REPEAT_SECONDS):
                    await self._grown.wait()

    def _fail(self) -> None:
        """End this reading. The answer has not failed; a client can resume it later."""
        self._has_failed = True
        self._attached.push(0, JobFailed(0, 0, FailureCode.TAKEN_OVER, ""))

    # -- keeping it running ----------------------------------------------------------------------

    async def _follow(self) -> None:
        """Repeat the follow notice to the owner, and check that the owner is alive."""
        while not self._is_complete:
            self._is_left.clear()
            try:
                response = await self._library.store.read(self._head.request_id, most=0)
                if response is not None and not response.standing.state.is_end:
                    self._owner = await self._library.keep_running(response)
                    self._tell_owner()
            except RedisError as error:
                logger.warning("cannot follow an answer now: %s", type(error).__name__)
            except StoreUnavailableError:
                pass  # Redis is unavailable.
            except ApiError as error:
                # A limit keeps the answer from resuming now; its reader may retry later.
                logger.warning("answer %s cannot go on: %s", self._head.request_id, error.code)
                self._is_stuck = True
                self._grown.set()
                return
            raise_if_cancelled()
            with suppress(TimeoutError):
                async with asyncio.timeout(REPEAT_SECONDS):
                    await self._is_left.wait()

    def _tell_owner(self, *, is_over: bool = False) -> None:
        follow = Follow(self._head.request_id, self._gateway, self._handle, is_over)
        self._library.follow(self._owner, follow)
