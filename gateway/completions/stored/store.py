"""Responses in Redis, with a typed method for each script."""

import asyncio
import logging
from collections.abc import Sequence
from enum import Enum, StrEnum
from typing import Any, Final, NamedTuple

import msgspec

from contract import keys
from contract.messages import GenerationJob
from contract.queue import JOBS_AT_ONCE, LONG_PROMPT_TOKENS, JobQueue
from contract.scripts import CommandExecutor, LuaScript
from gateway.completions.stored.head import ResponseHead, decode_head, encode_head
from gateway.completions.stored.journal import compressed, is_compressed, restored
from gateway.limits.storage import allocated
from gateway.platform.concurrency.large_work import Beside
from gateway.records.principal import Principal
from gateway.records.usage_record import Counts

logger = logging.getLogger(__name__)

_PACKAGE = "gateway.completions.stored.scripts"
_OPEN = LuaScript("answer_open", _PACKAGE)
_APPEND = LuaScript("answer_append", _PACKAGE)
_ADOPT = LuaScript("answer_adopt", _PACKAGE)
_READ = LuaScript("answer_read_page", _PACKAGE)
_DELETE = LuaScript("answer_delete", _PACKAGE)

PAGE_ENTRIES: Final = 16
"""Journal entries read at once. An entry usually has the replies of one second."""
PAGE_BYTES: Final = 262_144
"""No further entry is read after this many bytes, so as not to block Redis and the event loop."""
DEADLINE_GRACE_MS: Final = 60_000
"""How much longer than its deadline a response that does not end is stored."""
THREAD_BYTES: Final = 65_536
"""Longer heads are compressed in a thread."""
RESPONSE_BYTES: Final = 2_048
"""What Redis stores of a response beside its head and its journal's entries: their keys, small
fields, the Idempotency-Key, and the entries that count its bytes."""


class ResponseState(StrEnum):
    """State of a response."""

    RUNNING = "running"  # Its jobs wait or run; its owner may be dead.
    FINISHED = "finished"
    FAILED = "failed"  # It ended with an error, which its readers receive.
    CANCELLED = "cancelled"  # A client cancelled it.
    LEFT = "left"  # All its readers disconnected; it resumes when a client attaches.

    @property
    def is_end(self) -> bool:
        """Whether no more output follows."""
        return self not in (ResponseState.RUNNING, ResponseState.LEFT)


class ResponseStatus(NamedTuple):
    """The part of a response that changes, besides its journal."""

    state: ResponseState
    reservation: str
    """Id of its reservation: its own, or a new one after its reservation has ended."""
    settled: Counts
    """Token counts in earlier records of its usage, which are not charged again."""
    handles: tuple[int, ...]
    """Handles of the jobs that the owner follows, or the former one until this one has written."""


class WriteResult(Enum):
    """Result of writing a response or its journal entries."""

    DONE = 1
    NOT_OWNER = 0  # Another gateway has taken the response over.
    MISSING = -1  # Redis has lost the response, or the end of its journal.


class JournalPage(NamedTuple):
    """A part of a response's journal, with all of the response that changes."""

    owner: str
    """The gateway that follows its jobs, or the last one that did."""
    term: int
    """Number of its owner, counted from 1 and incremented by each takeover."""
    is_background: bool
    """Whether it continues without a connected client."""
    status: ResponseStatus
    follower: str
    """The gateway whose reply stream has the replies to `status.handles`."""
    total_entries: int
    entries: list[bytes]


class StoredResponse(NamedTuple):
    """A response as stored in Redis when it was read."""

    head: ResponseHead
    head_bytes: int
    """What Redis stores of it beside the entries of its journal."""
    page: JournalPage

    @property
    def id(self) -> str:
        """The request's id, which is also the id of the completion."""
        return self.head.request_id

    @property
    def state(self) -> ResponseState:
        """Whether it runs, or how it ended."""
        return self.page.status.state

    @property
    def has_begun(self) -> bool:
        """Whether the journal contains any reply of a worker."""
        return self.page.total_entries > 0

    def is_readable_by(self, principal: Principal) -> bool:
        """Whether a caller of its tenant may use its project and its model."""
        record = self.head.record
        in_project = principal.project_id in (None, record.project_id)
        names = (self.head.model, record.full_model, record.adapter or record.model)
        return in_project and any(map(principal.allows_model, names))


_encode = msgspec.msgpack.Encoder().encode
_decode_handles = msgspec.msgpack.Decoder(tuple[int, ...]).decode
_decode_counts = msgspec.msgpack.Decoder(Counts).decode


class ResponseStore:
    """Operations on responses. All of them raise RedisError when Redis does not respond."""

    def __init__(self, executor: CommandExecutor) -> None:
        self._executor = executor

    async def open(
        self,
        request_id: str,
        packed: bytes,
        *,
        owner: str,
        term: int,
        is_background: bool,
        status: ResponseStatus,
        ttl_ms: int,
        entries: Sequence[bytes] = (),
    ) -> WriteResult:
        """Write a whole response with its packed head, unless another gateway owns it now."""
        code = await _OPEN.run(
            self._executor,
            **_keys(request_id),
            term=term,
            ttl_ms=ttl_ms,
            head=packed,
            owner=owner,
            background=int(is_background),
            **_fields(status),
            arguments=entries,
        )
        return WriteResult(code)

    async def append(
        self,
        request_id: str,
        *,
        term: int,
        index: int,
        entries: Sequence[bytes],
        status: ResponseStatus,
        ttl_ms: int,
    ) -> WriteResult:
        """Write entries after the first `index` entries of the journal, and update the status.

        Safe to repeat with the same entries, and with further ones after them.
        """
        code = await _APPEND.run(
            self._executor,
            **_keys(request_id),
            term=term,
            ttl_ms=ttl_ms,
            index=index,
            **_fields(status),
            arguments=entries,
        )
        return WriteResult(code)

    async def adopt(
        self,
        request_id: str,
        packed: bytes,
        *,
        term: int,
        state: ResponseState,
        owner: str,
        ttl_ms: int,
    ) -> int:
        """End the term `term` of a response in state `state`; set it to running.

        An empty `packed` keeps its head.

        Returns the new term, or 0 if the response has another owner or state by now.
        """
        new_term: int = await _ADOPT.run(
            self._executor,
            **_keys(request_id),
            term=term,
            state=state,
            ttl_ms=ttl_ms,
            owner=owner,
            no_handles=_encode(()),
            new_state=ResponseState.RUNNING,
            head=packed,
        )
        return new_term

    async def read(self, request_id: str, *, beside: Beside | None = None) -> StoredResponse | None:
        """Return a response without entries of its journal; None if it does not exist.

        Its head may be large: use `status` where that suffices. `beside` runs what a client's
        request needs. Raises what `Beside` raises.
        """
        fields = await self._read(request_id, 0, 0, with_head=True)
        if not fields:
            return None
        *rest, packed = fields
        head = await self._with_prompts(await _unpacked(packed, beside))
        return None if head is None else StoredResponse(head, bytes_of_head(packed), _page(rest))

    async def _with_prompts(self, head: ResponseHead) -> ResponseHead | None:
        """Return a head with whole prompts; None if Redis has lost chunks of them."""
        if not any(job.chunks for job in head.jobs):
            return head
        jobs, queue = list[GenerationJob](), JobQueue(self._executor, head.record.model)
        for job in head.jobs:
            whole, _ = await queue.with_prompt(job)
            if whole is None:
                logger.error("Redis has lost the prompt of response %s", head.request_id)
                return None
            jobs.append(whole)
        return msgspec.structs.replace(head, jobs=jobs)

    async def status(self, request_id: str) -> JournalPage | None:
        """Return what changes of a response, without entries; None if it does not exist."""
        fields = await self._read(request_id, 0, 0, with_head=False)
        return _page(fields) if fields else None

    async def read_page(self, request_id: str, *, index: int) -> JournalPage | None:
        """Return entries from `index` on, at least one if any exist.

        Returns None if the response does not exist.
        """
        fields = await self._read(request_id, index, PAGE_ENTRIES, with_head=False)
        return _page(fields) if fields else None

    async def _read(self, request_id: str, index: int, max_entries: int, *, with_head: bool) -> Any:
        return await _READ.run(
            self._executor,
            **_keys(request_id),
            index=index,
            most_entries=max_entries,
            most_bytes=PAGE_BYTES,
            with_head=int(with_head),
        )

    async def discard(self, request_id: str, *, has_key: bool = False) -> int:
        """Delete a response. Return the milliseconds for which a mark remains if it `has_key`."""
        marked_ms: int = await _DELETE.run(
            self._executor, **_keys(request_id), has_key=int(has_key)
        )
        return marked_ms

    async def is_deleted(self, request_id: str) -> bool:
        """Return whether a client has deleted a response to which an Idempotency-Key maps."""
        found = await self._executor.execute_command(
            "HEXISTS", keys.response(request_id), "deleted"
        )
        return bool(found)


def _fields(status: ResponseStatus) -> dict[str, Any]:
    return {
        "handles": _encode(status.handles),
        "reservation": status.reservation,
        "state": status.state,
        "settled": _encode(status.settled.encodable()),
    }


def _page(fields: Sequence[Any]) -> JournalPage:
    owner, term, background, handles, reservation, state, settled, *others = fields
    follower, total_entries, entries = others
    status = ResponseStatus(
        ResponseState(state.decode()),
        reservation.decode(),
        _decode_counts(settled),
        _decode_handles(handles),
    )
    return JournalPage(
        owner.decode(),
        int(term),
        background != b"0",
        status,
        follower.decode(),
        total_entries,
        entries,
    )


async def packed_head(head: ResponseHead) -> bytes:
    """Return a head as Redis stores it."""
    prompt_tokens = sum(len(job.rest) for job in head.jobs)
    if len(head.jobs) > JOBS_AT_ONCE or prompt_tokens > LONG_PROMPT_TOKENS:
        return await asyncio.to_thread(lambda: compressed(encode_head(head)))
    content = encode_head(head)
    if len(content) < THREAD_BYTES:
        return compressed(content)
    return await asyncio.to_thread(compressed, content)


def bytes_of_head(packed: bytes) -> int:
    """Return what Redis stores of a response beside the entries of its journal."""
    return RESPONSE_BYTES + allocated([len(packed)])


async def _unpacked(content: bytes, beside: Beside | None) -> ResponseHead:
    if not is_compressed(content):
        return decode_head(content)

    def unpack() -> ResponseHead:
        return decode_head(restored(content))

    # It may be far longer than its compressed form.
    if beside is None:
        return await asyncio.to_thread(unpack)
    return await beside(unpack, size=len(content))


def _keys(request_id: str) -> dict[str, str]:
    return {"response": keys.response(request_id), "journal": keys.journal(request_id)}
