"""Stored responses, which clients can resume from any gateway, even if gateways die.

A response has one owner, the gateway that follows its jobs. The owner writes what it receives to a
journal in Redis, and readers of all gateways read from there. If the owner is dead, the next
gateway that attaches a reader takes the response over.
"""

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, Final

from common.not_none import not_none
from common.tasks import each_apart, repeat
from contract.messages import CancelResponse, Delta, JobFailed, ResponseGrown
from contract.outcomes import FailureCode
from contract.queue import LostJob
from contract.scripts import CommandExecutor
from gateway.completions.queue.dispatcher import Dispatcher
from gateway.completions.queue.generation import Reply
from gateway.completions.rendering.assembler import WholeResponse
from gateway.completions.rendering.completion import Completion
from gateway.completions.rendering.form_registry import assembler_of
from gateway.completions.sealing import Sealer
from gateway.completions.settlement import CLOSE_SECONDS, Settlement, SettlementService
from gateway.completions.stored.head import ResponseHead
from gateway.completions.stored.journal import decode_slices, encode_entries, encode_message
from gateway.completions.stored.kept import KeptResponses
from gateway.completions.stored.owned import OwnedResponse, OwnedResponses
from gateway.completions.stored.peers import BackgroundIndex, Peers
from gateway.completions.stored.prompt_log import PromptLogs
from gateway.completions.stored.reader import ResponseReader
from gateway.completions.stored.store import (
    ResponseStore,
    StoredResponse,
    WriteResult,
    bytes_of_head,
)
from gateway.completions.stored.takeover import Takeovers
from gateway.dialects.responses.request import kept_options
from gateway.limits.replies import RequestState, RequestStatus
from gateway.limits.store import QuotaStore
from gateway.platform.concurrency.fair_turns import LoopTurns
from gateway.platform.concurrency.large_work import LargeWork
from gateway.platform.settings import Settings
from gateway.records.errors import queue_unavailable
from gateway.records.usage_record import Counts, Outcome

BACKGROUND_SECONDS: Final = 3.0
"""How often background responses of dead gateways are taken over."""
TAKEOVERS_AT_ONCE: Final = 8
"""Gateways, and responses of each."""
RETIRED_MS: Final = 60_000
"""How long the key of a line stays taken after its result was stored."""
CANCEL_SECONDS: Final = 5.0
"""How long an owner has to cancel a response."""
ASK_AGAIN_SECONDS: Final = 1.0
LOOK_SECONDS: Final = 0.03
"""How often it is checked whether a response has ended."""

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Responses:
    """All responses that one gateway process owns, and access to other gateways' responses."""

    _executor: CommandExecutor
    dispatcher: Dispatcher
    _settlements: SettlementService
    _requests: QuotaStore
    _loop_turns: LoopTurns
    _large_work: LargeWork
    _sealer: Sealer
    _settings: Settings
    kept: KeptResponses
    logs: PromptLogs

    def __post_init__(self) -> None:
        executor, dispatcher, settlements = self._executor, self.dispatcher, self._settlements
        self.store = ResponseStore(executor, self._requests)
        self._peers = Peers(executor, dispatcher, settlements.tasks)
        self._background = BackgroundIndex(executor, dispatcher.gateway)
        self._owned = OwnedResponses(
            self.store,
            self._peers,
            self._background,
            dispatcher,
            settlements,
            self._keep,
            self._log,
        )
        most_unread = self._settings.max_unread_bytes
        self._takeovers = Takeovers(executor, self._owned, max_unread_bytes=most_unread)
        notices = dispatcher.notices
        notices.on_follow, notices.on_cancel = self._takeovers.on_follow, self._on_cancel
        notices.on_grown, notices.on_orphan = self._on_grown, self._on_orphan

    # -- the request that generates a response ---------------------------------------------------

    def open(
        self, head: ResponseHead, packed: bytes, settlement: Settlement, *, counted: int = 0
    ) -> StoredResponse:
        """Store a response from now on, before its jobs are enqueued. Does not wait for Redis.

        `packed` is the head as it is stored, and `counted` the bytes that count already.

        Plain responses that are not streamed are never opened. The response ends with its
        settlement.
        """
        handles = tuple(job.handle for job in head.jobs)
        size = bytes_of_head(packed)
        response = OwnedResponse(
            self._owned, head, size, packed, settlement, 1, handles, counted, has_consumer=True
        )
        self._owned.add(response)
        response.write_soon()
        status = RequestStatus(
            RequestState.RUNNING, self.dispatcher.gateway, 1, head.is_background, Counts()
        )
        return StoredResponse(head, size, status, 0)

    async def require_stored(self, request_id: str, *, is_findable: bool) -> None:
        """Wait until every gateway can find a response of this gateway.

        Raises StoreUnavailableError if Redis does not store it. Unless its client can find it by
        an Idempotency-Key then, it is cancelled.
        """
        owned = self._owned.by_id.get(request_id)
        if owned is None or owned.is_stored:
            return
        await owned.write()
        if not owned.is_stored:
            if not is_findable:
                owned.cancel()
            raise queue_unavailable()

    def discard(self, request_id: str) -> asyncio.Task[Any] | None:
        """Delete a response whose jobs were not enqueued, in a task; None if it is not stored."""
        return self._owned.discard(request_id)

    def may_run(self, request_id: str) -> bool:
        """Return whether this gateway owns a response, whose jobs may be in the queue."""
        return request_id in self._owned.by_id

    def of(self, settlement: Settlement) -> OwnedResponse | Settlement:
        """Return what ends a request: its response if this gateway stores it, or its settlement.

        Both have `finish`, `fail` and `leave`.
        """
        return self._owned.of(settlement) or settlement

    # -- other requests --------------------------------------------------------------------------

    async def is_gone(self, gateway: str) -> bool:
        """Return whether another gateway is dead. Raises RedisError."""
        return gateway != self.dispatcher.gateway and not await self._peers.is_alive(gateway)

    async def find(self, request_id: str, *, tenant_id: str) -> StoredResponse | None:
        """Return a tenant's response; None if it does not exist, or is another tenant's.

        Raises RedisError, and an ApiError if too much of the tenant's work waits.
        """
        beside = self._large_work.of(tenant_id, size=0)
        stored = await self.store.read(tenant_id, request_id, beside=beside)
        if stored is not None and stored.head.is_background and not stored.state.is_end:
            self._takeovers.resume_soon(tenant_id, request_id)
        return stored

    async def require_intact(self) -> None:
        """Raise StoreUnavailableError if Redis was replaced a moment ago.

        It may then lack responses that their gateways write again. Raises RedisError.
        """
        presence = self.dispatcher.presence
        await presence.detect_outage(self._executor)
        if not presence.is_steady:
            raise queue_unavailable()

    async def attach(self, response: StoredResponse) -> ResponseReader:
        """Read a response from its beginning, and keep it running while it is being read.

        If the owner is dead, the response is taken over; if all clients had left, it resumes.
        Readers of a failed or cancelled response get the stored output, then the failure. Close the
        reader after use.

        Raises RateLimitError or InsufficientQuotaError if resuming needs a new reservation that the
        limits do not allow, StoreUnavailableError or RedisError while Redis does not respond.
        """
        if not response.state.is_end and response.id not in self._owned.by_id:
            status = await self._status_of(response)
            if status is not None and not status.state.is_end:
                await self._takeovers.keep_running(response.head.tenant_id, response.id, status)
        return ResponseReader(
            response.head,
            self.store,
            self._takeovers,
            self._peers,
            self.dispatcher.gateway,
            self._loop_turns,
            self._sealer,
        )

    async def cancel(self, response: StoredResponse) -> StoredResponse:
        """Cancel a response, even if clients read it, and return it as stored afterwards.

        A response that has ended is left unchanged. The response may still be running if its owner
        does not react. Raises RedisError.
        """
        deadline = time.monotonic() + CANCEL_SECONDS
        while not response.state.is_end:
            status = await self._status_of(response)
            if status is None:
                break
            response = response._replace(status=status)
            if response.state.is_end or time.monotonic() > deadline:
                break
            await self._cancel(response)
            await self._end_of(response)
        return response

    async def _end_of(self, response: StoredResponse) -> None:
        """Wait until a response ends, at most for ASK_AGAIN_SECONDS. Raises RedisError."""
        for _ in range(round(ASK_AGAIN_SECONDS / LOOK_SECONDS)):
            status = await self._status_of(response)
            if status is None or status.state.is_end:
                return
            await asyncio.sleep(LOOK_SECONDS)

    async def _status_of(self, response: StoredResponse) -> RequestStatus | None:
        return await self.store.status(response.head.tenant_id, response.id)

    async def _cancel(self, stored: StoredResponse) -> None:
        request_id, tenant_id = stored.id, stored.head.tenant_id
        if stored.state is RequestState.PAUSED:
            await self._cancel_paused(stored)
            return
        owner = await self._takeovers.keep_running(tenant_id, request_id, stored.status)
        owned = self._owned.by_id.get(request_id)
        if owned is not None:
            owned.cancel()
        else:
            self._peers.send(owner, cancels=[CancelResponse(request_id, tenant_id)])

    async def _cancel_paused(self, stored: StoredResponse) -> None:
        """Cancel a response that is settled and whose jobs do not run."""
        head, status, owner = stored.head, stored.status, self.dispatcher.gateway
        page = await self.store.read_page(head.request_id, index=stored.total_entries)
        if page is None:
            return
        cancelled = encode_message(0, JobFailed(0, 0, FailureCode.CANCELLED, ""))
        written = await self.store.append(
            head.request_id,
            term=status.term,
            index=page.total_entries,
            entries=encode_entries([cancelled], ""),
            gateway=owner,
            handles=(),
            ttl_ms=head.retention_ms,
        )
        if written is WriteResult.DONE:
            kept = head.kept(owner, status.term)
            await self._requests.cancel(head.tenant_id, head.request_id, kept)

    async def settled(self, response: StoredResponse) -> bool:
        """Wait until a line of a batch that was read to its end is settled.

        Return False if it was cancelled or failed after its last token, and is not charged. If the
        owner dies before, this gateway takes the response over. Raises an ApiError or RedisError,
        and StoreUnavailableError if the response is gone, so that nobody knows how it ended.
        """
        while True:
            status = await self._status_of(response)
            if status is None or status.state is RequestState.DELETED:
                raise queue_unavailable()
            if status.state.is_end:
                return status.state is RequestState.FINISHED
            await self._takeovers.keep_running(response.head.tenant_id, response.id, status)
            await self._end_of(response)

    async def forget(self, head: ResponseHead) -> None:
        """Delete an ended response, whose bytes are free then. Raises RedisError.

        Its Idempotency-Key stays taken as long as the response would have. That of a line, whose
        bytes do not count any more, does for a minute: until then, a gateway that did not notice
        the end of the line cannot run it again.
        """
        request_id, tenant_id, is_line = head.request_id, head.tenant_id, bool(head.record.line)
        owned = self._owned.by_id.get(request_id)
        if owned is not None:
            # A later write would store it again.
            await owned.write()
        self._owned.forget(request_id)
        most_ms = RETIRED_MS if is_line else None
        await self._requests.forget(tenant_id, request_id, most_ms=most_ms)
        await self.store.discard(request_id)

    async def _keep(self, response: OwnedResponse) -> None:
        """Keep a response that ends without a client here, if its request wants that."""
        completion = response.head.completion(self._sealer)
        if kept_options(completion.request) is not None:
            whole = await self._whole(response.head, completion, response.entries)
            await not_none(self.kept.finish(completion, whole.content))

    async def _whole(
        self, head: ResponseHead, completion: Completion, entries: Sequence[bytes]
    ) -> WholeResponse:
        assembler = assembler_of(completion)
        turn = partial(self._loop_turns.slice_of, head.tenant_id)
        for received in chain.from_iterable(map(decode_slices, entries)):
            replies = [Reply(*each) for each in received]
            await assembler.prompt_logprobs.prepare(replies, turn)
            async with turn():
                for reply in replies:
                    assembler.add(reply)
        return await assembler.response(turn)

    async def _log(self, head: ResponseHead, entries: Sequence[bytes], outcome: Outcome) -> None:
        completion = head.completion(self._sealer)
        if outcome is Outcome.FINISHED:
            whole = await self._whole(head, completion, entries)
            self.logs.end(head.record, completion, outcome, response=whole.content)
            return
        texts = defaultdict[tuple[int, int], str](str)
        for received in chain.from_iterable(map(decode_slices, entries)):
            async with self._loop_turns.slice_of(head.tenant_id):
                for index, message in received:
                    if isinstance(message, Delta):
                        texts[index, message.choice] += message.text
        in_order = [text for _, text in sorted(texts.items())]
        self.logs.end(head.record, completion, outcome, texts=in_order)

    # -- loops -----------------------------------------------------------------------------------

    async def run(self) -> None:
        """Write journals and take over background responses of dead gateways, until cancelled."""
        seconds = self._settings.journal_interval.total_seconds()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(repeat("write journals", self._owned.check, seconds=seconds))
            tasks.create_task(self._keep_resuming())
            tasks.create_task(
                repeat(
                    "look for dead gateways", self.take_over_background, seconds=BACKGROUND_SECONDS
                )
            )

    def hand_over(self) -> None:
        """Leave responses without a client here to other gateways, because this process stops."""
        for response in list(self._owned.by_id.values()):
            if not response.has_consumer:
                response.hand_over()

    async def aclose(self) -> None:
        """Leave unfinished responses to other gateways, and write all journals.

        This takes at most CLOSE_SECONDS. What is not written then is in the reply stream.
        """
        for response in list(self._owned.by_id.values()):
            response.hand_over()
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_SECONDS):
                await self._owned.write()

    async def take_over_background(self) -> None:
        """Take over the background responses of dead gateways.

        A gateway or a response for which that fails delays no other. Raises RedisError at the end.
        """
        await self._background.refresh()
        owners = await self._background.other_owners()
        await each_apart(self._take_over_from, owners, at_once=TAKEOVERS_AT_ONCE)

    async def _take_over_from(self, owner: str) -> None:
        if await self._peers.is_alive(owner):
            return

        async def take_over(response: tuple[str, str]) -> None:
            if await self._takeovers.resume(*response):
                await self._background.remove_of(owner, *response)

        responses = await self._background.responses_of(owner)
        await each_apart(take_over, responses, at_once=TAKEOVERS_AT_ONCE)
        await self._background.remove_owner(owner)

    async def _keep_resuming(self) -> None:
        while True:
            self._takeovers.resume_soon(*await self._owned.interrupted.get())

    # -- notices ---------------------------------------------------------------------------------

    def _on_grown(self, grown: ResponseGrown) -> None:
        self._peers.notify_reader(self.dispatcher.gateway, grown.handle)

    def _on_cancel(self, cancel: CancelResponse) -> None:
        owned = self._owned.by_id.get(cancel.request_id)
        if owned is not None:
            owned.cancel()
        elif not self.dispatcher.fail_request(cancel.request_id, FailureCode.CANCELLED):
            self._takeovers.resume_soon(cancel.tenant, cancel.request_id)

    async def _on_orphan(self, _model: str, lost: LostJob) -> bool:
        """Take over a background response of a dead gateway; return whether the job is of one."""
        request_id = lost.job_id.rpartition("-")[0]
        status = await self.store.status(lost.tenant, request_id)
        if status is None or status.state is not RequestState.RUNNING:
            return False
        if not status.is_background:
            return False
        self._takeovers.resume_soon(lost.tenant, request_id)
        return True
