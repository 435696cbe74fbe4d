"""Takeover: resume a response whose owner is dead, or whose clients had all disconnected."""

import asyncio
import logging
from collections.abc import Sequence
from typing import Final

import msgspec
from redis.exceptions import RedisError

from common import clock
from common.tracing import TAKE_OVER
from contract.dialect import Dialect
from contract.messages import Follow, JobFailed, JobMessage, JobStarted
from contract.outcomes import FailureCode
from contract.scripts import CommandExecutor
from gateway.completions.queue.dispatcher import Adopted
from gateway.completions.queue.generation import Generation
from gateway.completions.queue.reader import entry_id_of
from gateway.completions.settlement import Settlement, Slices
from gateway.completions.stored.head import ResponseHead
from gateway.completions.stored.history import History, UnreadReplies
from gateway.completions.stored.journal import (
    Received,
    decode_entry,
    encode_entries,
    encode_message,
)
from gateway.completions.stored.owned import OwnedResponse, OwnedResponses
from gateway.completions.stored.store import (
    DEADLINE_GRACE_MS,
    JournalPage,
    ResponseState,
    ResponseStatus,
    StoredResponse,
)
from gateway.limits.replies import ReservationRequest, sees_key
from gateway.limits.reservations import Admission
from gateway.platform import telemetry, tracing
from gateway.records.errors import ApiError, StoreUnavailableError
from gateway.records.usage_record import LOST_CODE, Counts, Outcome, UsageRecord

MAX_CONCURRENT: Final = 8
"""Responses that are taken over concurrently when a gateway with many responses dies."""

for _state in ResponseState:
    if not _state.is_end:
        telemetry.RESPONSES_TAKEN_OVER.labels(_state)  # Exported even while it is 0.

logger = logging.getLogger(__name__)


class Takeovers:
    """Gives responses that must run an owner: the live one that they have, or this gateway."""

    def __init__(
        self, executor: CommandExecutor, owned: OwnedResponses, *, max_unread_bytes: int
    ) -> None:
        self._executor = executor
        self._owned = owned
        self._store = owned.store
        self._dispatcher = owned.dispatcher
        self._settlements = owned.settlements
        self._peers = owned.peers
        self._max_unread_bytes = max_unread_bytes
        self._turns = asyncio.Semaphore(MAX_CONCURRENT)
        self._running: dict[str, asyncio.Task[None]] = {}
        self._unread: dict[str, UnreadReplies] = {}
        """By former owner, while responses are taken over."""

    async def keep_running(self, response: StoredResponse) -> str:
        """Ensure that a response has a live owner that follows its jobs; return that owner.

        Raises an ApiError if the response cannot resume, and RedisError.
        """
        request_id, gateway = response.id, self._dispatcher.gateway
        if request_id in self._owned.by_id:
            return gateway
        is_running = response.state is ResponseState.RUNNING
        if is_running and await self._peers.is_alive(response.owner):
            return response.owner
        task = self._running.get(request_id)
        if task is None:
            task = asyncio.create_task(self._take_over(response))
            self._running[request_id] = task
            task.add_done_callback(lambda done: self._done(request_id, done))
        await asyncio.shield(task)
        if request_id in self._owned.by_id:
            return gateway
        taken = await self._store.read(request_id, max_entries=0)
        return response.owner if taken is None else taken.owner

    async def resume(self, request_id: str) -> bool:
        """Keep a response running if it should run. Return False if this must be retried."""
        try:
            stored = await self._store.read(request_id, max_entries=0)
            if stored is not None and not stored.state.is_end:
                is_ours = stored.owner == self._dispatcher.gateway
                if is_ours or stored.head.is_background:
                    await self.keep_running(stored)
        except (StoreUnavailableError, RedisError) as error:
            logger.warning("cannot resume response %s: %s", request_id, type(error).__name__)
            return False
        except ApiError as error:
            # It resumes when a client requests it.
            logger.warning("response %s may not resume: %s", request_id, error.code)
            self._owned.background.remove(request_id)
        return True

    def resume_soon(self, request_id: str) -> None:
        """Keep a response running if it should run, in the background."""
        if request_id not in self._owned.by_id:
            self._owned.tasks.start(self.resume(request_id))

    def follow(self, owner: str, follow: Follow) -> None:
        """Send a `Follow` to an owner, which may be this gateway."""
        if owner == self._dispatcher.gateway:
            self.on_follow(follow)
        else:
            self._peers.send(owner, follows=[follow])

    def on_follow(self, follow: Follow) -> None:
        """Apply a `Follow` that a gateway sent to this one."""
        owned = self._owned.by_id.get(follow.request_id)
        if owned is not None:
            owned.follow(follow)
        elif not follow.is_over:
            # It has ended, or this gateway owns it because a takeover failed halfway.
            self.resume_soon(follow.request_id)
            self._peers.notify_reader(follow.gateway, follow.handle)

    def _done(self, request_id: str, task: "asyncio.Task[None]") -> None:
        del self._running[request_id]
        if not self._running:
            self._unread.clear()
        # If every waiter was cancelled, asyncio would log the error as never retrieved.
        if not task.cancelled():
            task.exception()

    # -- takeover --------------------------------------------------------------------------------

    async def _take_over(self, response: StoredResponse) -> None:
        """Own a response and follow its jobs, unless another gateway took it over first.

        Raises an ApiError if it cannot resume, and RedisError; it can be retried after either.
        """
        trace = tracing.context_of(response.head.jobs[0].traceparent)
        async with self._turns:
            with tracing.span_in(trace, TAKE_OVER):
                await self._adopt(response)

    async def _adopt(self, response: StoredResponse) -> None:
        head = response.head
        is_running = response.state is ResponseState.RUNNING
        if not is_running:
            head = _with_new_deadline(head)
        term = await self._store.adopt(
            head,
            term=response.term,
            state=response.state,
            owner=self._dispatcher.gateway,
            ttl_ms=head.most_ms + DEADLINE_GRACE_MS + head.retention_ms,
        )
        if not term:
            return
        # Writes of earlier owners are rejected from now on, so the journal is complete.
        history, entries, through, page = await self._read_journal(head)
        unread: list[Received] = []
        if is_running and page is not None:
            # Another gateway may have taken the response over, and written, since it was read.
            response = response._replace(status=page.status)
            unread = history.add_unread(await self._read_replies(head, page, through))
        generation = _generation(history, max_unread_bytes=self._max_unread_bytes)
        try:
            settlement, status = await self._settlement(response, term, history, generation)
        except StoreUnavailableError:
            raise
        except ApiError:
            await self._store_as_left(response, term, history, entries=entries, unread=unread)
            raise
        owned = OwnedResponse(
            self._owned,
            head,
            settlement,
            term,
            status,
            has_consumer=False,
            entries=list(entries),
        )
        owned.restore(history.received, unread=unread)
        self._owned.add(owned)
        reads_again = not (is_running or response.status.settled.prompt_tokens)
        self._follow_jobs(owned, history, reads_again=reads_again)
        telemetry.RESPONSES_TAKEN_OVER.labels(response.state).inc()
        logger.info("this gateway took response %s over", head.request_id)

    def _follow_jobs(self, owned: OwnedResponse, history: History, *, reads_again: bool) -> None:
        """Resume the jobs that have not ended. Prompts count again if the request `reads_again`."""
        head, generation = owned.head, owned.generation
        adopted = [
            Adopted(job, history.of(index), max(history.jobs[index].attempt, 1))
            for index, job in enumerate(head.jobs)
        ]
        if reads_again:
            # An engine without the counts of an earlier attempt reports the prompt tokens it reads.
            adopted = [each._replace(history=_without_counts(each.history)) for each in adopted]
        try:
            if history.failure is None:
                self._dispatcher.adopt(
                    head.record.model, adopted, weight=head.weight, generation=generation
                )
        except ValueError:
            logger.exception("response %s cannot resume", head.request_id)
            generation.push(0, JobFailed(0, 0, FailureCode.REPLIES_LOST, ""))
        owned.set_handles(tuple(job.handle for job in generation.jobs))

    # -- its history -----------------------------------------------------------------------------

    async def _read_journal(
        self, head: ResponseHead
    ) -> tuple[History, list[bytes], str, JournalPage | None]:
        """Return the history in the journal, its entries, the id of the last reply in it, and the
        last page; None if Redis has lost the journal.
        """
        history, through = History(head.jobs), ""
        entries: list[bytes] = []
        while True:
            page = await self._store.read_page(head.request_id, index=len(entries))
            if page is None or not page.entries:
                return history, entries, through, page
            for entry in page.entries:
                received, through = decode_entry(entry)
                history.add(received)
                entries.append(entry)

    async def _read_replies(
        self, head: ResponseHead, page: JournalPage, through: str
    ) -> list[Received]:
        """Return replies missing from the journal, whether the former owner read them or not."""
        if not page.status.handles:
            return []
        unread = self._unread.get(page.follower)
        if unread is None:
            unread = self._unread[page.follower] = UnreadReplies(
                self._executor, former=page.follower, gateway=self._dispatcher.gateway
            )
        # Both times are by the clock of Redis.
        after = entry_id_of(through.encode()) if through else (head.record.created_ms - 1, 0)
        return await unread.of(page.status.handles, after=after)

    # -- its reservation -------------------------------------------------------------------------

    async def _settlement(
        self, response: StoredResponse, term: int, history: History, generation: Generation
    ) -> tuple[Settlement, ResponseStatus]:
        """Take the reservation over, or make a new one for the rest if it was settled."""
        head, status = response.head, response.status
        reservations = self._settlements.reservations
        draft = self._draft(head, status.reservation, status.settled)
        is_running = status.state is ResponseState.RUNNING
        request = _reservation_request(head, draft)
        reserved = await reservations.take_over(request) if is_running else None
        is_open = reserved is not None
        if is_open or history.has_finished or history.failure is not None:
            admission = Admission(head.record.created_ms, {})
            if not is_open and (head.record.line or draft.request_id == head.request_id):
                # The sweep releases a line without a record. It settles other requests as lost,
                # with the counts that Redis has, which a failover may have lost. The ledger then
                # adds the difference. If the former owner has settled the request, the ledger
                # keeps that record. A later reservation has another time, and would be a new row.
                reservations.adopt(draft.tenant_id, draft.request_id)
        else:
            settled = history.counts(head.record) if is_running else status.settled
            if head.record.line:
                settled = Counts()  # The sweep has recorded nothing.
            elif is_running and draft.request_id == head.request_id:
                await self._settle_lost(draft, settled)
            draft = self._draft(head, f"{head.request_id}.{term}", settled)
            status = status._replace(reservation=draft.request_id, settled=settled)
            request = _reservation_request(head, draft)
            reserved = request.completion_tokens
            admission = await reservations.reserve(
                request,
                is_openai=draft.dialect == Dialect.OPENAI,
                # The address of the client that resumes is unknown here.
                sees=sees_key,
            )
            if head.record.line:
                # Two settlements are one in the ledger only if their times are equal too.
                admission = Admission(head.record.created_ms, {})
        settlement = self._settlements.open(draft, admission, generation)
        if head.is_sliced:
            slices = _slices(head, head.most)
            slices.reserved = draft.completion_tokens + (reserved or 0)
            self._settlements.reserve_in_slices(settlement, slices)
        return settlement, status._replace(state=ResponseState.RUNNING, handles=())

    async def _settle_lost(self, draft: UsageRecord, received: Counts) -> None:
        """Settle the part of a response that was received from its first reservation.

        A failover may have lost that reservation, or receipts that the sweep did not find. The
        ledger adds what an earlier settlement as lost has less.
        """
        reservations = self._settlements.reservations
        reservations.adopt(draft.tenant_id, draft.request_id)
        await reservations.settle(
            draft.ended(received, free=Counts(), outcome=Outcome.LOST, code=LOST_CODE)
        )

    def _draft(self, head: ResponseHead, reservation: str, settled: Counts) -> UsageRecord:
        return msgspec.structs.replace(
            head.record,
            request_id=reservation,
            gateway=self._dispatcher.gateway,
            **settled._asdict(),
        )

    async def _store_as_left(
        self,
        response: StoredResponse,
        term: int,
        history: History,
        *,
        entries: list[bytes],
        unread: list[Received],
    ) -> None:
        """Store a response that cannot resume now, so that a client can resume it later."""
        status = response.status
        settled = (
            status.settled
            if status.state is ResponseState.LEFT
            else history.counts(response.head.record)
        )
        await self._store.append(
            response.id,
            term=term,
            index=len(entries),
            entries=encode_entries([encode_message(*each) for each in unread], ""),
            status=ResponseStatus(ResponseState.LEFT, status.reservation, settled, ()),
            ttl_ms=response.head.retention_ms,
        )


def _without_counts(history: Sequence[JobMessage]) -> list[JobMessage]:
    return [
        msgspec.structs.replace(each, prompt_tokens=0, cached_tokens=0)
        if isinstance(each, JobStarted)
        else each
        for each in history
    ]


def _generation(history: History, *, max_unread_bytes: int) -> Generation:
    """Return a generation that has received a history, and keeps no replies."""
    generation = Generation(max_unread_bytes=max_unread_bytes)
    generation.detach()
    for index, message in history.received:
        generation.push(index, message)
    return generation


def _with_new_deadline(head: ResponseHead) -> ResponseHead:
    deadline_ms = clock.now_ms() + head.most_ms
    jobs = [msgspec.structs.replace(job, deadline_ms=deadline_ms) for job in head.jobs]
    return msgspec.structs.replace(head, jobs=jobs)


def _slices(head: ResponseHead, most: Counts) -> Slices:
    return Slices(head.subjects, most, sequences=sum(job.n for job in head.jobs))


def _reservation_request(head: ResponseHead, draft: UsageRecord) -> ReservationRequest:
    """Return the reservation request for the most that a resumed response may use."""
    most = draft.used(head.most)
    if head.is_sliced:
        most = _slices(head, most).first
    return ReservationRequest.of(draft, head.subjects, most)
