"""Takeover: resume a response whose owner is dead, or whose clients had all disconnected."""

import asyncio
import logging
from collections.abc import Sequence
from typing import Final

import msgspec
from redis.exceptions import RedisError

from common import clock
from common.tracing import TAKE_OVER, context_of
from contract.dialect import Dialect
from contract.messages import Follow, JobFailed, JobMessage, JobStarted
from contract.outcomes import FailureCode
from contract.scripts import CommandExecutor
from gateway.completions.queue.dispatcher import Adopted
from gateway.completions.queue.generation import Generation
from gateway.completions.queue.reader import entry_id_of
from gateway.completions.settlement import Slices
from gateway.completions.stored.head import ResponseHead
from gateway.completions.stored.history import History, UnreadReplies
from gateway.completions.stored.journal import Received, decode_entry
from gateway.completions.stored.owned import OwnedResponse, OwnedResponses
from gateway.completions.stored.store import (
    DEADLINE_GRACE_MS,
    JournalPage,
    StoredResponse,
    bytes_of_head,
    packed_head,
)
from gateway.limits.replies import (
    Kept,
    RequestState,
    RequestStatus,
    ReservationRequest,
    sees_key,
)
from gateway.limits.reservations import Admission
from gateway.platform import telemetry, tracing
from gateway.records.errors import (
    ApiError,
    StoreUnavailableError,
)
from gateway.records.usage_record import Counts, UsageRecord

MAX_CONCURRENT: Final = 8
"""Responses that are taken over concurrently when a gateway with many responses dies."""

for _state in (RequestState.RUNNING, RequestState.PAUSED):
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

    async def keep_running(self, tenant_id: str, request_id: str, status: RequestStatus) -> str:
        """Ensure that a response has a live owner that follows its jobs; return that owner.

        Raises an ApiError if the response cannot resume, and RedisError.
        """
        gateway = self._dispatcher.gateway
        if request_id in self._owned.by_id:
            return gateway
        is_running = status.state is RequestState.RUNNING
        if is_running and await self._peers.is_alive(status.owner):
            return status.owner
        task = self._running.get(request_id)
        if task is None:
            task = asyncio.create_task(self._take_over(tenant_id, request_id, status.term))
            self._running[request_id] = task
            task.add_done_callback(lambda done: self._done(request_id, done))
        await asyncio.shield(task)
        if request_id in self._owned.by_id:
            return gateway
        taken = await self._store.status(tenant_id, request_id)
        return status.owner if taken is None else taken.owner

    async def is_written(self, request_id: str, owner: str) -> bool:
        """Whether this gateway or a live owner may still write a response. Raises RedisError."""
        return request_id in self._owned.by_id or await self._peers.is_alive(owner)

    async def resume(self, tenant_id: str, request_id: str) -> bool:
        """Keep a response running if it should run. Return False if this must be retried."""
        try:
            status = await self._store.status(tenant_id, request_id)
            if status is not None and not status.state.is_end:
                is_ours = status.owner == self._dispatcher.gateway
                if is_ours or status.is_background:
                    await self.keep_running(tenant_id, request_id, status)
        except (StoreUnavailableError, RedisError) as error:
            logger.warning("cannot resume response %s: %s", request_id, type(error).__name__)
            return False
        except ApiError as error:
            # It resumes when a client requests it.
            logger.warning("response %s may not resume: %s", request_id, error.code)
            self._owned.background.remove(tenant_id, request_id)
        return True

    def resume_soon(self, tenant_id: str, request_id: str) -> None:
        """Keep a response running if it should run, in the background."""
        if request_id not in self._owned.by_id:
            self._owned.tasks.start(self.resume(tenant_id, request_id))

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
            self.resume_soon(follow.tenant, follow.request_id)
            self._peers.notify_reader(follow.gateway, follow.handle)

    def _done(self, request_id: str, task: "asyncio.Task[None]") -> None:
        del self._running[request_id]
        if not self._running:
            self._unread.clear()
        # If every waiter was cancelled, asyncio would log the error as never retrieved.
        if not task.cancelled():
            task.exception()

    # -- takeover --------------------------------------------------------------------------------

    async def _take_over(self, tenant_id: str, request_id: str, term: int) -> None:
        """Own a response and follow its jobs, unless another gateway took it over first.

        Raises an ApiError if it cannot resume, and RedisError; it can be retried after either.
        """
        async with self._turns:
            response = await self._store.read(tenant_id, request_id)
            if response is None or response.status.term != term or response.state.is_end:
                return
            trace = context_of(response.head.jobs[0].traceparent)
            with tracing.span_in(trace, TAKE_OVER):
                await self._adopt(response)

    async def _adopt(self, response: StoredResponse) -> None:
        head, status, packed = response.head, response.status, b""
        is_running = status.state is RequestState.RUNNING
        if not is_running:
            head = _resumed(head, status.term + 1, now_ms=await self._redis_ms())
            packed = await packed_head(head)
        kept = head.kept(self._dispatcher.gateway, status.term + 1)
        reserved = await self._reserve(head, status, kept)
        if reserved is None:
            return
        try:
            await self._begin_term(response, head, packed, kept, reserved)
        except BaseException:
            # This gateway or another one tries again: nobody follows the jobs.
            self._settlements.reservations.hand_over(head.request_id)
            raise

    async def _begin_term(
        self,
        response: StoredResponse,
        head: ResponseHead,
        packed: bytes,
        kept: Kept,
        reserved: int,
    ) -> None:
        """Follow the jobs of a response that this gateway owns now."""
        status = response.status
        is_running = status.state is RequestState.RUNNING
        await self._store.adopt(
            head.request_id,
            packed,
            term=kept.term,
            ttl_ms=head.most_ms + DEADLINE_GRACE_MS + head.retention_ms,
        )
        # Writes of earlier owners are rejected from now on, so the journal is complete.
        history, entries, through, page = await self._read_journal(head)
        unread: list[Received] = []
        if page is not None:
            unread = history.add_unread(await self._read_replies(response.head, page, through))
        generation = _generation(history, max_unread_bytes=self._max_unread_bytes)
        draft = self._draft(head, status.settled)
        settlement = self._settlements.open(
            draft, Admission(draft.created_ms, {}), generation, kept=kept
        )
        if head.is_sliced:
            slices = _slices(head, head.most)
            slices.reserved = draft.completion_tokens + reserved
            self._settlements.reserve_in_slices(settlement, slices)
        owned = OwnedResponse(
            self._owned,
            head,
            bytes_of_head(packed) if packed else response.head_bytes,
            b"",
            settlement,
            kept.term,
            (),
            1,  # An earlier owner may have counted it.
            has_consumer=False,
            entries=list(entries),
        )
        owned.restore(history.received, unread=unread)
        self._owned.add(owned)
        reads_again = not (is_running or status.settled.prompt_tokens)
        self._follow_jobs(owned, history, reads_again=reads_again)
        telemetry.RESPONSES_TAKEN_OVER.labels(status.state).inc()
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
        if not page.handles:
            return []
        unread = self._unread.get(page.gateway)
        if unread is None:
            unread = self._unread[page.gateway] = UnreadReplies(
                self._executor, former=page.gateway, gateway=self._dispatcher.gateway
            )
        # Both times are by the clock of Redis.
        after = entry_id_of(through.encode()) if through else (head.record.created_ms - 1, 0)
        return await unread.of(page.handles, after=after)

    # -- its reservation -------------------------------------------------------------------------

    async def _reserve(self, head: ResponseHead, status: RequestStatus, kept: Kept) -> int | None:
        """Own the record of a response: with what it holds if it runs, else with a new reservation.

        Return the completion tokens that are reserved; None if it has another owner or state by
        now. Raises RateLimitError or InsufficientQuotaError if a paused response may not resume.
        """
        reservations = self._settlements.reservations
        draft = self._draft(head, status.settled)
        most = draft.used(head.most)
        if head.is_sliced:
            most = _slices(head, most).first
        request = ReservationRequest.of(draft, head.subjects, most, kept=kept)
        if status.state is RequestState.RUNNING:
            return await reservations.adopt(request, kept)
        # The address of the client that resumes is unknown here.
        resumes = await reservations.resume(
            request, is_openai=draft.dialect == Dialect.OPENAI, sees=sees_key
        )
        return request.completion_tokens if resumes else None

    def _draft(self, head: ResponseHead, settled: Counts) -> UsageRecord:
        if head.record.line:
            settled = Counts()  # A line is recorded once, when it has its result.
        return msgspec.structs.replace(
            head.record, gateway=self._dispatcher.gateway, **settled._asdict()
        )

    async def _redis_ms(self) -> int:
        seconds, microseconds = await self._executor.execute_command("TIME")
        return int(seconds) * 1000 + int(microseconds) // 1000


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


def _resumed(head: ResponseHead, term: int, *, now_ms: int) -> ResponseHead:
    """Return the head of a settled response that resumes, with a usage record for the rest."""
    deadline_ms = clock.now_ms() + head.most_ms
    jobs = [msgspec.structs.replace(job, deadline_ms=deadline_ms) for job in head.jobs]
    record = head.record
    if not record.line:
        request_id = f"{head.request_id}.{term}"
        record = msgspec.structs.replace(record, request_id=request_id, created_ms=now_ms)
    return msgspec.structs.replace(head, jobs=jobs, record=record)


def _slices(head: ResponseHead, most: Counts) -> Slices:
    return Slices(head.subjects, most, sequences=sum(job.n for job in head.jobs))
