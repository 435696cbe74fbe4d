"""Answers: stored responses that clients can resume from any gateway, even if gateways die.

An answer has one owner, the gateway that follows its jobs. The owner writes what it receives to a
journal in Redis, and attached readers read from there. If the owner is dead, the next gateway that
attaches a reader takes the answer over.
"""

import asyncio
import itertools
import logging
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

from redis.asyncio import Redis
from redis.exceptions import RedisError

from contract import keys, messages
from contract.messages import CancelResponse, Follow, Frame, JobFailed, ResponseGrown
from contract.outcomes import FailureCode
from contract.queue import LostJob
from contract.scripts import CommandExecutor
from gateway.concurrency.fair_turns import LoopTurns
from gateway.concurrency.tasks import raise_if_cancelled
from gateway.dispatch.dispatcher import Dispatcher
from gateway.errors import ApiError, StoreUnavailableError
from gateway.quota.storage import Storage
from gateway.responses.background import BackgroundWatch
from gateway.responses.entries import Received, encode_entry
from gateway.responses.head import ResponseHead
from gateway.responses.kept import KeptResponse
from gateway.responses.reader import Attachment
from gateway.responses.settlement import Settlement, SettlementDesk
from gateway.responses.store import ResponseState, ResponseStore, Standing, StoredResponse
from gateway.responses.takeover import TakeOver
from gateway.tenancy.usage_record import Counts, Outcome

__all__ = ["Attachment", "ClientResponse", "ResponseHead", "ResponseState", "Responses"]

MOST_AT_ONCE: Final = 50
"""Journals that are written before the event loop runs other tasks."""
NOTICE_SECONDS: Final = 60
"""Lifetime of notices for a gateway that does not read them."""
CANCEL_SECONDS: Final = 5.0
"""How long an owner has to cancel an answer."""
ASK_AGAIN_SECONDS: Final = 1.0
LOOK_SECONDS: Final = 0.02

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientResponse:
    """A snapshot of an answer, taken when it was looked up."""

    head: ResponseHead
    state: ResponseState
    has_begun: bool
    """Whether a worker has sent any reply for it."""
    owner: str
    """The gateway that follows its jobs, or the last one that did."""
    term: int
    """Number of its owner, counted from 1 and incremented by each takeover."""

    @property
    def id(self) -> str:
        """The request's id, which is also the id of the completion."""
        return self.head.request_id


class Responses:
    """All answers that one gateway process owns, and access to those of other gateways."""

    def __init__(
        self,
        client: "Redis",
        executor: CommandExecutor,
        dispatcher: Dispatcher,
        desk: SettlementDesk,
        *,
        storage: Storage,
        loop_turns: LoopTurns,
        journal_interval: timedelta,
        max_unread_bytes: int,
    ) -> None:
        self.store = ResponseStore(executor)
        self.dispatcher = dispatcher
        self.desk = desk
        self.loop_turns = loop_turns
        self._storage = storage
        self._executor = executor
        self._journal_seconds = journal_interval.total_seconds()
        self._kept: dict[str, KeptResponse] = {}
        self._readers: dict[int, Attachment] = {}
        self._handles = itertools.count(1)
        self._take_over = TakeOver(client, self, max_unread_bytes=max_unread_bytes)
        self._background = BackgroundWatch(
            executor, dispatcher.gateway, is_alive=self.is_alive, go_on=self.go_on
        )
        self._taking: dict[str, asyncio.Task[None]] = {}
        dispatcher.on_follow = self._on_follow
        dispatcher.on_grown = self._on_grown
        dispatcher.on_cancel = self._on_cancel
        dispatcher.on_orphan = self._on_orphan

    # -- for request handlers --------------------------------------------------------------------

    def open(self, head: ResponseHead, settlement: Settlement) -> None:
        """Keep an answer from now on, before its jobs are enqueued. Does not wait for Redis.

        Plain responses that are not streamed are never opened; all other methods accept them too.
        The answer ends with its account, without a further call. A retention of 0 stores nothing.
        """
        if head.retention_ms <= 0:
            return
        if head.is_background:
            self._background.note(head.request_id)
        handles = tuple(job.handle for job in head.jobs)
        kept = KeptResponse(
            self,
            head,
            settlement,
            term=1,
            standing=Standing(ResponseState.RUNNING, head.request_id, Counts(), handles),
            has_consumer=True,
        )
        self._kept[head.request_id] = kept
        kept.flush_soon()

    def discard(self, request_id: str) -> None:
        """Drop an answer whose jobs were not enqueued. Does nothing if it is unknown."""
        kept = self._kept.pop(request_id, None)
        if kept is not None:
            self._background.forget(request_id)
            self.desk.start(kept.discard())

    async def find(self, request_id: str, *, tenant_id: str) -> ClientResponse | None:
        """Return a tenant's answer; None if it is unknown, expired or another tenant's.

        Raises RedisError.
        """
        stored = await self.store.read(request_id, most=0)
        if stored is None or stored.head.tenant_id != tenant_id:
            return None
        if stored.head.is_background and stored.standing.state is ResponseState.RUNNING:
            self.go_on_soon(request_id)
        return _as_it_stands(stored)

    async def attach(self, response: ClientResponse) -> Attachment:
        """Read an answer from its beginning, and keep it running while it is being read.

        If the owner is dead, the answer is taken over; if all clients had left, it resumes.
        Readers of a failed or cancelled answer get the stored output, then the failure. Close the
        attachment after use.

        Raises RateLimitError or InsufficientQuotaError if resuming needs a new reservation that the
        limits do not allow, StoreUnavailableError or RedisError while Redis does not respond.
        """
        if not response.state.is_end and response.id not in self._kept:
            stored = await self.store.read(response.id, most=0)
            if stored is not None and not stored.standing.state.is_end:
                await self.keep_running(stored)
        handle = next(self._handles)
        attachment = Attachment(self, response.head, gateway=self.dispatcher.gateway, handle=handle)
        self._readers[handle] = attachment
        return attachment

    async def cancel(self, response: ClientResponse) -> ClientResponse:
        """Cancel an answer, even if clients read it, and return it as it is afterwards.

        An answer that has ended is left unchanged. The answer may still be running if its owner
        does not react. Raises RedisError.
        """
        loop = asyncio.get_running_loop()
        deadline, ask_at = loop.time() + CANCEL_SECONDS, loop.time()
        while not response.state.is_end and loop.time() < deadline:
            stored = await self.store.read(response.id, most=0)
            if stored is None:
                break
            response = _as_it_stands(stored)
            if loop.time() >= ask_at and not response.state.is_end:
                await self._cancel(stored)
                ask_at += ASK_AGAIN_SECONDS
            else:
                await asyncio.sleep(LOOK_SECONDS)
        return response

    def leave(self, settlement: Settlement, code: str = "") -> None:
        """Note that the client that began a request has disconnected; accepts any kind of answer.

        If no other client reads the answer, its work stops and it is settled as cancelled, with
        `code`; otherwise it continues. To run a background answer without a client, call this as
        soon as its jobs are enqueued.
        """
        kept = self._kept.get(settlement.record.request_id)
        if kept is None:
            settlement.end(Outcome.CANCELLED, code)
        else:
            kept.leave(code)

    # -- loop ------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Write journals and take over background answers of dead gateways, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._keep_flushing())
            tasks.create_task(self._background.run())

    async def _keep_flushing(self) -> None:
        while True:
            await asyncio.sleep(self._journal_seconds)
            await self._flush_all()
            raise_if_cancelled()

    def hand_over(self) -> None:
        """Leave answers without a client here to other gateways, because this process stops."""
        for kept in list(self._kept.values()):
            if not kept.has_consumer:
                kept.hand_over()

    async def aclose(self) -> None:
        """Leave unfinished answers to other gateways, and write all journals."""
        for kept in list(self._kept.values()):
            kept.hand_over()
        await self._flush_all()

    async def _flush_all(self) -> None:
        kept = list(self._kept.values())
        for start in range(0, len(kept), MOST_AT_ONCE):
            some = kept[start : start + MOST_AT_ONCE]
            for each in some:
                each.look_around()
            await asyncio.gather(*(each.flush() for each in some if each.has_news))
            await asyncio.sleep(0)

    # -- for kept answers and readers ------------------------------------------------------------

    def tell(self, gateway: str, handle: int) -> None:
        """Notify a follower that its answer has grown."""
        if gateway == self.dispatcher.gateway:
            self._on_grown(ResponseGrown(handle))
        else:
            self._send(gateway, grown=[ResponseGrown(handle)])

    def follow(self, owner: str, follow: Follow) -> None:
        """Send a `Follow` to an owner."""
        if owner == self.dispatcher.gateway:
            self._on_follow(follow)
        else:
            self._send(owner, follows=[follow])

    def keep(self, kept: KeptResponse) -> None:
        """Own an answer that was taken over."""
        self._kept[kept.head.request_id] = kept
        if kept.head.is_background:
            self._background.note(kept.head.request_id)

    def is_over(self, kept: KeptResponse) -> None:
        """Stop keeping an answer that has ended or is lost."""
        if self._kept.get(kept.head.request_id) is kept:
            del self._kept[kept.head.request_id]
            self._count(kept)
            if kept.is_to_go_on:
                self.go_on_soon(kept.head.request_id)
            elif kept.head.is_background:
                self._background.forget(kept.head.request_id)

    def _count(self, kept: KeptResponse) -> None:
        """Count the stored bytes in place of those that the request reserved."""
        head = kept.head
        if head.stored_bytes:
            self.desk.start(
                self._storage.settle(
                    head.tenant_id,
                    head.subjects,
                    head.request_id,
                    kept.stored_bytes,
                    live_ms=head.retention_ms,
                )
            )

    def forget_reader(self, handle: int) -> None:
        """Remove a reader that was closed."""
        self._readers.pop(handle, None)

    def go_on_soon(self, request_id: str) -> None:
        """Keep an answer running, in the background."""
        if request_id not in self._kept:
            self.desk.start(self.go_on(request_id))

    async def keep_running(self, response: StoredResponse) -> str:
        """Ensure that an answer has a live owner that follows its jobs; return that owner.

        Raises an ApiError if the answer cannot resume, and RedisError.
        """
        request_id = response.head.request_id
        if request_id in self._kept:
            return self.dispatcher.gateway
        if response.standing.state is ResponseState.RUNNING and await self.is_alive(response.owner):
            return response.owner
        task = self._taking.get(request_id)
        if task is None:
            task = asyncio.create_task(self._take_over.run(response))
            self._taking[request_id] = task
            task.add_done_callback(lambda done: self._has_taken(request_id, done))
        await asyncio.shield(task)
        if request_id in self._kept:
            return self.dispatcher.gateway
        taken = await self.store.read(request_id, most=0)
        return response.owner if taken is None else taken.owner

    def _has_taken(self, request_id: str, done: "asyncio.Task[None]") -> None:
        del self._taking[request_id]
        # If every waiter was cancelled, asyncio would log the error as never retrieved.
        if not done.cancelled():
            done.exception()

    async def is_alive(self, owner: str) -> bool:
        """Whether a gateway is alive, or may be as far as is known. Raises RedisError."""
        if owner == self.dispatcher.gateway:
            return False  # The answer would be in `_kept`.
        if not (self.dispatcher.is_steady and self.dispatcher.may_judge_others()):
            # After an outage, other gateways may not have sent a heartbeat yet.
            return True
        return bool(await self._executor.execute_command("EXISTS", keys.gateway_alive(owner)))

    # -- notices from other gateways -------------------------------------------------------------

    def _on_follow(self, follow: Follow) -> None:
        kept = self._kept.get(follow.request_id)
        if kept is not None:
            kept.follow(follow)
        elif not follow.is_over:
            # It has ended, or this gateway owns it because a takeover failed halfway.
            self.desk.start(self.go_on(follow.request_id))
            self.tell(follow.gateway, follow.handle)

    def _on_grown(self, grown: ResponseGrown) -> None:
        reader = self._readers.get(grown.handle)
        if reader is not None:
            reader.grown()

    def _on_cancel(self, cancel: CancelResponse) -> None:
        kept = self._kept.get(cancel.request_id)
        if kept is not None:
            kept.cancel()
        else:
            self.desk.start(self.go_on(cancel.request_id))

    async def _on_orphan(self, _model: str, lost: LostJob) -> bool:
        """Take over a background answer of a dead gateway; return whether the job is of one."""
        request_id = lost.job_id.rpartition("-")[0]
        stored = await self.store.read(request_id, most=0)
        if stored is None or stored.standing.state is not ResponseState.RUNNING:
            return False
        if not stored.head.is_background:
            return False
        self.go_on_soon(request_id)
        return True

    async def go_on(self, request_id: str) -> bool:
        """Keep an answer running if it should run. Return False if this must be retried."""
        try:
            stored = await self.store.read(request_id, most=0)
            if stored is not None and not stored.standing.state.is_end:
                is_ours = stored.owner == self.dispatcher.gateway
                if is_ours or stored.head.is_background:
                    await self.keep_running(stored)
        except (StoreUnavailableError, RedisError) as error:
            logger.warning("answer %s cannot go on now: %s", request_id, type(error).__name__)
            return False
        except ApiError as error:
            # It resumes when a client requests it.
            logger.warning("answer %s may not go on: %s", request_id, error.code)
            self._background.forget(request_id)
        return True

    async def _cancel(self, stored: StoredResponse) -> None:
        request_id = stored.head.request_id
        if stored.standing.state is ResponseState.LEFT:
            await self._cancel_left(stored)
            return
        owner = await self.keep_running(stored)
        kept = self._kept.get(request_id)
        if kept is not None:
            kept.cancel()
        else:
            self._send(owner, cancels=[CancelResponse(request_id)])

    async def _cancel_left(self, stored: StoredResponse) -> None:
        """Cancel an answer that is settled and whose jobs do not run."""
        request_id, head = stored.head.request_id, stored.head
        gateway, standing = self.dispatcher.gateway, stored.standing
        term = await self.store.adopt(
            head,
            term=stored.term,
            state=ResponseState.LEFT,
            owner=gateway,
            live_ms=head.retention_ms,
        )
        if term:
            cancelled = Received(0, JobFailed(0, 0, FailureCode.CANCELLED, ""))
            await self.store.append(
                request_id,
                term=term,
                index=stored.entries_in_all,
                entries=[encode_entry([cancelled], "")],
                standing=standing._replace(state=ResponseState.CANCELLED, handles=()),
                live_ms=head.retention_ms,
            )

    def _send(self, gateway: str, **notices: Any) -> None:
        """Send notices to another gateway. Lost notices are requested or sent again."""
        frame = messages.encode(Frame(self.dispatcher.gateway, 0, **notices))
        self.desk.start(self._post(gateway, frame))

    async def _post(self, gateway: str, frame: bytes) -> None:
        stream, execute = keys.replies(gateway), self._executor.execute_command
        try:
            await asyncio.gather(
                execute("XADD", stream, "*", "f", frame),
                # A dead gateway would never remove the notice.
                execute("EXPIRE", stream, NOTICE_SECONDS),
            )
        except RedisError as error:
            logger.warning("cannot tell gateway %s now: %s", gateway, type(error).__name__)


def _as_it_stands(stored: StoredResponse) -> ClientResponse:
    return ClientResponse(
        head=stored.head,
        state=stored.standing.state,
        has_begun=stored.entries_in_all > 0,
        owner=stored.owner,
        term=stored.term,
    )
