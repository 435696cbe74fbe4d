"""Answers that clients may come back for: from any gateway, with any gateway dying in between.

An answer has one owner, the gateway that follows its jobs. It writes what it receives into a journal in
Redis; whoever attaches reads from there. If the owner is dead, whoever attaches takes the answer over.
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
from contract.messages import AnswerGrown, CancelAnswer, Follow, Frame, JobFailed
from contract.outcomes import FailureCode
from contract.queue import LostJob
from contract.scripts import CommandExecutor
from gateway.accounts.usage import Counts, Outcome
from gateway.answers.background import BackgroundWatch
from gateway.answers.entries import Received, encode_entry
from gateway.answers.head import AnswerHead
from gateway.answers.kept import KeptAnswer
from gateway.answers.reader import Attachment
from gateway.answers.settlement import Account, SettlementDesk
from gateway.answers.store import AnswerState, AnswerStore, Standing, StoredAnswer
from gateway.answers.takeover import TakeOver
from gateway.dispatch.dispatcher import Dispatcher
from gateway.errors import ApiError, StoreUnavailableError
from gateway.quota.storage import Storage
from gateway.tasks import raise_if_cancelled
from gateway.turns import LoopTurns

__all__ = ["Answer", "AnswerHead", "AnswerState", "Answers", "Attachment"]

MOST_AT_ONCE: Final = 50
"""Journals that are written before others have their turn."""
NOTICE_SECONDS: Final = 60
"""How long notices wait for a gateway that does not read them."""
CANCEL_SECONDS: Final = 5.0
"""How long an owner has time to end an answer."""
ASK_AGAIN_SECONDS: Final = 1.0
LOOK_SECONDS: Final = 0.02

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """An answer as it stood when it was looked up."""

    head: AnswerHead
    state: AnswerState
    has_begun: bool
    """Whether a worker has told anything of it."""
    owner: str
    """The gateway that follows its jobs, or did so last."""
    term: int
    """Number of its owner, counted from 1: each taking over is one more."""

    @property
    def id(self) -> str:
        """The request's id, which is also the completion's."""
        return self.head.request_id


class Answers:
    """All answers that one gateway process owns, and its way to those of others."""

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
        self.store = AnswerStore(executor)
        self.dispatcher = dispatcher
        self.desk = desk
        self.loop_turns = loop_turns
        self._storage = storage
        self._executor = executor
        self._journal_seconds = journal_interval.total_seconds()
        self._kept: dict[str, KeptAnswer] = {}
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

    # -- what handlers use -----------------------------------------------------------------------

    def open(self, head: AnswerHead, account: Account) -> None:
        """Keep an answer from now on, before its jobs are enqueued. Does not wait for Redis.

        Plain whole answers are never opened, and every method takes them all the same. The answer ends
        with its account: nobody has to tell. A retention of 0 keeps nothing.
        """
        if head.retention_ms <= 0:
            return
        if head.is_background:
            self._background.note(head.request_id)
        handles = tuple(job.handle for job in head.jobs)
        kept = KeptAnswer(
            self,
            head,
            account,
            term=1,
            standing=Standing(AnswerState.RUNNING, head.request_id, Counts(), handles),
            has_consumer=True,
        )
        self._kept[head.request_id] = kept
        kept.flush_soon()

    def discard(self, request_id: str) -> None:
        """Forget an answer whose jobs were not enqueued; nothing happens if it is not known."""
        kept = self._kept.pop(request_id, None)
        if kept is not None:
            self._background.forget(request_id)
            self.desk.start(kept.discard())

    async def find(self, request_id: str, *, tenant_id: str) -> Answer | None:
        """Return a tenant's answer; None if it is unknown, expired or another tenant's.

        Raises RedisError.
        """
        stored = await self.store.read(request_id, most=0)
        if stored is None or stored.head.tenant_id != tenant_id:
            return None
        if stored.head.is_background and stored.standing.state is AnswerState.RUNNING:
            self.go_on_soon(request_id)
        return _as_it_stands(stored)

    async def attach(self, answer: Answer) -> Attachment:
        """Read an answer from its beginning, and keep it running as long as that lasts.

        One whose owner is dead is taken over, one that everybody left goes on. A reader of one that failed
        or was cancelled gets what there is, and then the failure. Close the attachment in the end.

        Raises RateLimitError or InsufficientQuotaError if it can only go on with a new reservation that the
        limits do not allow, StoreUnavailableError or RedisError while Redis does not answer.
        """
        if not answer.state.is_end and answer.id not in self._kept:
            stored = await self.store.read(answer.id, most=0)
            if stored is not None and not stored.standing.state.is_end:
                await self.keep_running(stored)
        handle = next(self._handles)
        attachment = Attachment(self, answer.head, gateway=self.dispatcher.gateway, handle=handle)
        self._readers[handle] = attachment
        return attachment

    async def cancel(self, answer: Answer) -> Answer:
        """End an answer, whoever reads it; return it as it stands then. One that has ended stays as it is.

        It may be running yet if its owner does not react. Raises RedisError.
        """
        loop = asyncio.get_running_loop()
        deadline, ask_at = loop.time() + CANCEL_SECONDS, loop.time()
        while not answer.state.is_end and loop.time() < deadline:
            stored = await self.store.read(answer.id, most=0)
            if stored is None:
                break
            answer = _as_it_stands(stored)
            if loop.time() >= ask_at and not answer.state.is_end:
                await self._cancel(stored)
                ask_at += ASK_AGAIN_SECONDS
            else:
                await asyncio.sleep(LOOK_SECONDS)
        return answer

    def leave(self, account: Account, code: str = "") -> None:
        """Note that whoever began a request waits for it no longer, whatever kind of answer it has.

        If nobody else does, its work stops and it is settled as cancelled, with `code`; else it goes on by
        itself. To run a background answer without a client, leave it as soon as its jobs are enqueued.
        """
        kept = self._kept.get(account.record.request_id)
        if kept is None:
            account.end(Outcome.CANCELLED, code)
        else:
            kept.leave(code)

    # -- its loop --------------------------------------------------------------------------------

    async def run(self) -> None:
        """Write journals, and look after background answers of dead gateways, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._keep_flushing())
            tasks.create_task(self._background.run())

    async def _keep_flushing(self) -> None:
        while True:
            await asyncio.sleep(self._journal_seconds)
            await self._flush_all()
            raise_if_cancelled()

    def hand_over(self) -> None:
        """Leave answers to other gateways that nobody waits for here, because this process stops."""
        for kept in list(self._kept.values()):
            if not kept.has_consumer:
                kept.hand_over()

    async def aclose(self) -> None:
        """Leave what is not finished to other gateways, and write all journals."""
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

    # -- what kept answers and readers use -------------------------------------------------------

    def tell(self, gateway: str, handle: int) -> None:
        """Say to a follower that its answer has grown."""
        if gateway == self.dispatcher.gateway:
            self._on_grown(AnswerGrown(handle))
        else:
            self._send(gateway, grown=[AnswerGrown(handle)])

    def follow(self, owner: str, follow: Follow) -> None:
        """Send a `Follow` to an owner."""
        if owner == self.dispatcher.gateway:
            self._on_follow(follow)
        else:
            self._send(owner, follows=[follow])

    def keep(self, kept: KeptAnswer) -> None:
        """Own an answer that was taken over."""
        self._kept[kept.head.request_id] = kept
        if kept.head.is_background:
            self._background.note(kept.head.request_id)

    def is_over(self, kept: KeptAnswer) -> None:
        """Nothing is left to do for an answer."""
        if self._kept.get(kept.head.request_id) is kept:
            del self._kept[kept.head.request_id]
            self._count(kept)
            if kept.is_to_go_on:
                self.go_on_soon(kept.head.request_id)
            elif kept.head.is_background:
                self._background.forget(kept.head.request_id)

    def _count(self, kept: KeptAnswer) -> None:
        """Count the bytes that are kept from now on, in place of those that the request has taken."""
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
        """Somebody reads no longer."""
        self._readers.pop(handle, None)

    def go_on_soon(self, request_id: str) -> None:
        """See to it in the background that an answer runs."""
        if request_id not in self._kept:
            self.desk.start(self.go_on(request_id))

    async def keep_running(self, answer: StoredAnswer) -> str:
        """See to it that an answer has an owner that lives and follows its jobs; return it.

        Raises an ApiError if it cannot go on, and RedisError.
        """
        request_id = answer.head.request_id
        if request_id in self._kept:
            return self.dispatcher.gateway
        if answer.standing.state is AnswerState.RUNNING and await self.is_alive(answer.owner):
            return answer.owner
        task = self._taking.get(request_id)
        if task is None:
            task = asyncio.create_task(self._take_over.run(answer))
            self._taking[request_id] = task
            task.add_done_callback(lambda done: self._has_taken(request_id, done))
        await asyncio.shield(task)
        if request_id in self._kept:
            return self.dispatcher.gateway
        taken = await self.store.read(request_id, most=0)
        return answer.owner if taken is None else taken.owner

    def _has_taken(self, request_id: str, done: "asyncio.Task[None]") -> None:
        del self._taking[request_id]
        # All who waited may be gone; asyncio would complain about an error that nobody took.
        if not done.cancelled():
            done.exception()

    async def is_alive(self, owner: str) -> bool:
        """Whether a gateway lives, or may live as far as can be known now. Raises RedisError."""
        if owner == self.dispatcher.gateway:
            return False  # It would be kept.
        if not (self.dispatcher.is_steady and self.dispatcher.may_judge_others()):
            # After an outage others may not have said yet that they live.
            return True
        return bool(await self._executor.execute_command("EXISTS", keys.gateway_alive(owner)))

    # -- notices from other gateways -------------------------------------------------------------

    def _on_follow(self, follow: Follow) -> None:
        kept = self._kept.get(follow.request_id)
        if kept is not None:
            kept.follow(follow)
        elif not follow.is_over:
            # It has ended, or it is ours and got stuck while it was taken over.
            self.desk.start(self.go_on(follow.request_id))
            self.tell(follow.gateway, follow.handle)

    def _on_grown(self, grown: AnswerGrown) -> None:
        reader = self._readers.get(grown.handle)
        if reader is not None:
            reader.grown()

    def _on_cancel(self, cancel: CancelAnswer) -> None:
        kept = self._kept.get(cancel.request_id)
        if kept is not None:
            kept.cancel()
        else:
            self.desk.start(self.go_on(cancel.request_id))

    async def _on_orphan(self, _model: str, lost: LostJob) -> bool:
        """Take over a background answer whose gateway is gone. Return whether the job is one of those."""
        request_id = lost.job_id.rpartition("-")[0]
        stored = await self.store.read(request_id, most=0)
        if stored is None or stored.standing.state is not AnswerState.RUNNING:
            return False
        if not stored.head.is_background:
            return False
        self.go_on_soon(request_id)
        return True

    async def go_on(self, request_id: str) -> bool:
        """See to it that an answer runs, if it is to. Return False if that is to be tried again."""
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
            # It waits for somebody who asks for it.
            logger.warning("answer %s may not go on: %s", request_id, error.code)
            self._background.forget(request_id)
        return True

    async def _cancel(self, stored: StoredAnswer) -> None:
        request_id = stored.head.request_id
        if stored.standing.state is AnswerState.LEFT:
            await self._cancel_left(stored)
            return
        owner = await self.keep_running(stored)
        kept = self._kept.get(request_id)
        if kept is not None:
            kept.cancel()
        else:
            self._send(owner, cancels=[CancelAnswer(request_id)])

    async def _cancel_left(self, stored: StoredAnswer) -> None:
        """End an answer that nobody runs and that is settled."""
        request_id, head = stored.head.request_id, stored.head
        gateway, standing = self.dispatcher.gateway, stored.standing
        term = await self.store.adopt(
            head,
            term=stored.term,
            state=AnswerState.LEFT,
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
                standing=standing._replace(state=AnswerState.CANCELLED, handles=()),
                live_ms=head.retention_ms,
            )

    def _send(self, gateway: str, **notices: Any) -> None:
        """Tell another gateway something; if that gets lost, it is asked or told again."""
        frame = messages.encode(Frame(self.dispatcher.gateway, 0, **notices))
        self.desk.start(self._post(gateway, frame))

    async def _post(self, gateway: str, frame: bytes) -> None:
        stream, execute = keys.replies(gateway), self._executor.execute_command
        try:
            await asyncio.gather(
                execute("XADD", stream, "*", "f", frame),
                # It may be gone, and nobody would ever take the notice away.
                execute("EXPIRE", stream, NOTICE_SECONDS),
            )
        except RedisError as error:
            logger.warning("cannot tell gateway %s now: %s", gateway, type(error).__name__)


def _as_it_stands(stored: StoredAnswer) -> Answer:
    return Answer(
        head=stored.head,
        state=stored.standing.state,
        has_begun=stored.entries_in_all > 0,
        owner=stored.owner,
        term=stored.term,
    )
