"""Takeover: resume an answer whose owner is dead, or whose clients had all disconnected."""

import asyncio
import logging
from collections.abc import Sequence
from typing import Any, Final, Protocol

import msgspec
from redis.asyncio import Redis

from contract import clock, keys, messages
from contract.dialect import Dialect
from contract.messages import JobFailed, JobStarted
from contract.outcomes import FailureCode
from contract.tracing import TAKE_OVER
from gateway import telemetry, tracing
from gateway.dispatch.dispatcher import Adopted
from gateway.dispatch.generation import Generation, JobMessage
from gateway.errors import ApiError, StoreUnavailableError
from gateway.quota.replies import ReservationRequest, sees_key
from gateway.quota.reservations import Admission
from gateway.responses.entries import Received, decode_entry, encode_entry
from gateway.responses.head import ResponseHead
from gateway.responses.history import History, frame_messages
from gateway.responses.kept import LIVE_GRACE_MS, KeptResponse, Office
from gateway.responses.settlement import Settlement
from gateway.responses.store import ResponseState, Standing, StoredResponse
from gateway.tenancy.usage_record import Counts, UsageRecord

MOST_AT_ONCE: Final = 8
"""Responses that are taken over concurrently when a gateway with many answers dies."""
FRAMES_AT_ONCE: Final = 256

for _state in ResponseState:
    if not _state.is_end:
        telemetry.RESPONSES_TAKEN_OVER.labels(_state)  # Exported even while it is 0.

logger = logging.getLogger(__name__)


class Shelf(Office, Protocol):
    """The part of `Responses` that takeovers use."""

    def keep(self, kept: KeptResponse) -> None:
        """Own an answer that was taken over."""


class TakeOver:
    """Takes answers over for one gateway process."""

    def __init__(self, client: "Redis", shelf: Shelf, *, max_unread_bytes: int) -> None:
        self._client = client
        self._shelf = shelf
        self._max_unread_bytes = max_unread_bytes
        self._turns = asyncio.Semaphore(MOST_AT_ONCE)

    async def run(self, response: StoredResponse) -> None:
        """Own an answer and follow its jobs, unless another gateway took it over first.

        Raises an ApiError if it cannot resume, and RedisError; it can be retried after either.
        """
        trace = tracing.context_of(response.head.jobs[0].traceparent)
        async with self._turns:
            with tracing.span_in(trace, TAKE_OVER):
                await self._run(response)

    async def _run(self, response: StoredResponse) -> None:
        head, shelf = response.head, self._shelf
        is_running = response.standing.state is ResponseState.RUNNING
        if not is_running:
            head = _with_new_deadline(head)
        term = await shelf.store.adopt(
            head,
            term=response.term,
            state=response.standing.state,
            owner=shelf.dispatcher.gateway,
            live_ms=head.most_ms + LIVE_GRACE_MS + head.retention_ms,
        )
        if not term:
            return
        # Writes of earlier owners are rejected from now on, so the journal is complete.
        history, entries, through = await self._read_journal(head)
        unread: list[Received] = []
        if is_running:
            unread = history.add_unread(await self._read_replies(response, through))
        generation = _generation(history, max_unread_bytes=self._max_unread_bytes)
        try:
            settlement, standing = await self._settlement(response, term, history, generation)
        except StoreUnavailableError:
            raise
        except ApiError:
            await self._leave(response, term, history, entries=entries, unread=unread)
            raise
        kept = KeptResponse(
            shelf,
            head,
            settlement,
            term=term,
            standing=standing,
            entries=entries,
            has_consumer=False,
        )
        kept.recall(history.received, unread=unread)
        shelf.keep(kept)
        self._follow_jobs(kept, history, reads_again=not is_running)
        telemetry.RESPONSES_TAKEN_OVER.labels(response.standing.state).inc()
        logger.info("answer %s is this gateway's now", head.request_id)

    def _follow_jobs(self, kept: KeptResponse, history: History, *, reads_again: bool) -> None:
        """Resume the jobs that have not ended. Prompts count again if the request `reads_again`."""
        head, generation = kept.head, kept.generation
        adopted = [
            Adopted(job, history.of(index), max(history.jobs[index].attempt, 1))
            for index, job in enumerate(head.jobs)
        ]
        if reads_again:
            # An engine without the counts of an earlier attempt reports the prompt tokens it reads.
            adopted = [each._replace(history=_without_counts(each.history)) for each in adopted]
        try:
            if history.failure is None:
                self._shelf.dispatcher.adopt(
                    head.record.model, adopted, weight=head.weight, generation=generation
                )
        except ValueError:
            logger.exception("answer %s cannot go on", head.request_id)
            generation.push(0, JobFailed(0, 0, FailureCode.REPLIES_LOST, ""))
        kept.has_begun(tuple(job.handle for job in generation.jobs))

    # -- its history -----------------------------------------------------------------------------

    async def _read_journal(self, head: ResponseHead) -> tuple[History, list[bytes], str]:
        """Return the history in the journal, its entries, and the id of the last reply in it."""
        history, through = History(head.jobs), ""
        entries: list[bytes] = []
        while True:
            page = await self._shelf.store.read_page(head.request_id, index=len(entries))
            if page is None or not page.entries:
                return history, entries, through
            for entry in page.entries:
                received, through = decode_entry(entry)
                history.add(received)
                entries.append(entry)

    async def _read_replies(self, response: StoredResponse, through: str) -> list[Received]:
        """Return replies missing from the journal, whether the owner read them or not."""
        prompts = {handle: index for index, handle in enumerate(response.standing.handles)}
        received: list[Received] = []
        last = through
        while prompts:
            found: Any = await self._client.xrange(
                keys.replies(response.owner), min=f"({last}" if last else "-", count=FRAMES_AT_ONCE
            )
            for entry_id, fields in found:
                last = entry_id.decode()
                received += _messages(fields, prompts)
            if len(found) < FRAMES_AT_ONCE:
                break
        return received

    # -- its reservation -------------------------------------------------------------------------

    async def _settlement(
        self, response: StoredResponse, term: int, history: History, generation: Generation
    ) -> tuple[Settlement, Standing]:
        """Take the reservation over, or make a new one for the rest if it was settled."""
        head, standing, desk = response.head, response.standing, self._shelf.desk
        draft = self._draft(head, standing.reservation, standing.settled)
        is_running = standing.state is ResponseState.RUNNING
        is_open = is_running and await desk.reservations.take_over(
            _reservation_request(head, draft)
        )
        if is_open or history.has_finished or history.failure is not None:
            admission = Admission(head.record.created_ms, {})
        else:
            # All clients had left; the engine reads the prompts again and the tenant pays for it.
            left = Counts(completion_tokens=standing.settled.completion_tokens)
            settled = history.counts() if is_running else left
            draft = self._draft(head, f"{head.request_id}.{term}", settled)
            standing = standing._replace(reservation=draft.request_id, settled=settled)
            admission = await desk.reservations.reserve(
                _reservation_request(head, draft),
                is_openai=draft.dialect == Dialect.OPENAI,
                # The address of the client that resumes is unknown here.
                sees=sees_key,
            )
        settlement = desk.open(draft, admission, generation)
        return settlement, standing._replace(state=ResponseState.RUNNING, handles=())

    def _draft(self, head: ResponseHead, reservation: str, settled: Counts) -> UsageRecord:
        return msgspec.structs.replace(
            head.record,
            request_id=reservation,
            gateway=self._shelf.dispatcher.gateway,
            **settled._asdict(),
        )

    async def _leave(
        self,
        response: StoredResponse,
        term: int,
        history: History,
        *,
        entries: list[bytes],
        unread: list[Received],
    ) -> None:
        """Store an answer that cannot resume now, so that a client can resume it later."""
        standing = response.standing
        settled = standing.settled if standing.state is ResponseState.LEFT else history.counts()
        await self._shelf.store.append(
            response.head.request_id,
            term=term,
            index=len(entries),
            entries=[encode_entry(unread, "")] if unread else [],
            standing=Standing(ResponseState.LEFT, standing.reservation, settled, ()),
            live_ms=response.head.retention_ms,
        )


def _without_counts(history: Sequence[JobMessage]) -> list[JobMessage]:
    return [message for message in history if not isinstance(message, JobStarted)]


def _generation(history: History, *, max_unread_bytes: int) -> Generation:
    """Return a generation that has received a history, and keeps no replies."""
    generation = Generation(max_unread_bytes=max_unread_bytes)
    generation.detach()
    for index, message in history.received:
        generation.push(index, message)
    return generation


def _messages(fields: dict[bytes, bytes], prompts: dict[int, int]) -> list[Received]:
    try:
        return list(frame_messages(messages.decode_frame(fields[b"f"]), prompts))
    except (msgspec.MsgspecError, KeyError):
        # The frame is lost; the job resumes after the output before it.
        logger.exception("a reply frame cannot be read")
        return []


def _with_new_deadline(head: ResponseHead) -> ResponseHead:
    deadline_ms = clock.now_ms() + head.most_ms
    jobs = [msgspec.structs.replace(job, deadline_ms=deadline_ms) for job in head.jobs]
    return msgspec.structs.replace(head, jobs=jobs)


def _reservation_request(head: ResponseHead, draft: UsageRecord) -> ReservationRequest:
    """Return the reservation request for the most that a resumed answer may use."""
    most = draft.used(**head.most._asdict())
    return ReservationRequest.of(
        draft,
        head.subjects,
        prompt_tokens=most.prompt_tokens,
        completion_tokens=most.completion_tokens,
    )
