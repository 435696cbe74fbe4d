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
from gateway.records.principal import Principal
from gateway.records.usage_record import Counts

logger = logging.getLogger(__name__)

_PACKAGE = "gateway.completions.stored.scripts"
_OPEN = LuaScript("answer_open", _PACKAGE)
_APPEND = LuaScript("answer_append", _PACKAGE)
_ADOPT = LuaScript("answer_adopt", _PACKAGE)
_READ = LuaScript("answer_read_page", _PACKAGE)

PAGE_ENTRIES: Final = 16
"""Journal entries read at once. An entry usually has the replies of one second."""
PAGE_BYTES: Final = 262_144
"""No further entry is read after this many bytes, so as not to block Redis and the event loop."""
DEADLINE_GRACE_MS: Final = 60_000
"""How much longer than its deadline a response that does not end is stored."""
THREAD_BYTES: Final = 65_536
"""Longer heads are compressed in a thread."""


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
    """A part of a response's journal."""

    status: ResponseStatus
    follower: str
    """The gateway whose reply stream has the replies to `status.handles`."""
    total_entries: int
    entries: list[bytes]


class StoredResponse(NamedTuple):
    """A response as stored in Redis when it was read, with a part of its journal."""

    head: ResponseHead
    owner: str
    """The gateway that follows its jobs, or the last one that did."""
    term: int
    """Number of its owner, counted from 1 and incremented by each takeover."""
    status: ResponseStatus
    follower: str
    """The gateway whose reply stream has the replies to `status.handles`."""
    total_entries: int
    entries: list[bytes]

    @property
    def id(self) -> str:
        """The request's id, which is also the id of the completion."""
        return self.head.request_id

    @property
    def state(self) -> ResponseState:
        """Whether it runs, or how it ended."""
        return self.status.state

    @property
    def has_begun(self) -> bool:
        """Whether the journal contains any reply of a worker."""
        return self.total_entries > 0

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
        head: ResponseHead,
        *,
        owner: str,
        term: int,
        status: ResponseStatus,
        ttl_ms: int,
        entries: Sequence[bytes] = (),
    ) -> WriteResult:
        """Write a whole response, unless another gateway owns it now."""
        code = await _OPEN.run(
            self._executor,
            **_keys(head.request_id),
            term=term,
            ttl_ms=ttl_ms,
            head=await _packed(head),
            owner=owner,
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
        head: ResponseHead,
        *,
        term: int,
        state: ResponseState,
        owner: str,
        ttl_ms: int,
    ) -> int:
        """End the term `term` of a response in state `state`; set it to running with this head.

        Returns the new term, or 0 if the response has another owner or state by now.
        """
        new_term: int = await _ADOPT.run(
            self._executor,
            **_keys(head.request_id),
            term=term,
            state=state,
            ttl_ms=ttl_ms,
            owner=owner,
            no_handles=_encode(()),
            new_state=ResponseState.RUNNING,
            head=await _packed(head),
        )
        return new_term

    async def read(
        self, request_id: str, *, index: int = 0, max_entries: int = PAGE_ENTRIES
    ) -> StoredResponse | None:
        """Return a response with up to `max_entries` from `index` on; None if it does not exist."""
        fields = await self._read(request_id, index, max_entries, with_head=True)
        if not fields:
            return None
        owner, term, *rest, packed = fields
        head = await self._with_prompts(await _unpacked(packed))
        if head is None:
            return None
        return StoredResponse(head, owner.decode(), int(term), *_page(rest))

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

    async def is_running(self, request_id: str) -> bool:
        """Return whether a response exists and has not ended. Reads no head, which may be large."""
        fields = await self._read(request_id, 0, 0, with_head=False)
        return bool(fields) and not _page(fields[2:]).status.state.is_end

    async def read_page(self, request_id: str, *, index: int) -> JournalPage | None:
        """Return entries from `index` on, at least one if any exist.

        Returns None if the response does not exist.
        """
        fields = await self._read(request_id, index, PAGE_ENTRIES, with_head=False)
        if not fields:
            return None
        _, _, *rest = fields
        return _page(rest)

    async def _read(self, request_id: str, index: int, max_entries: int, *, with_head: bool) -> Any:
        return await _READ.run(
            self._executor,
            **_keys(request_id),
            index=index,
            most_entries=max_entries,
            most_bytes=PAGE_BYTES,
            with_head=int(with_head),
        )

    async def discard(self, request_id: str) -> None:
        """Delete a response."""
        await self._executor.execute_command("DEL", *_keys(request_id).values())


def _fields(status: ResponseStatus) -> dict[str, Any]:
    return {
        "handles": _encode(status.handles),
        "reservation": status.reservation,
        "state": status.state,
        "settled": _encode(status.settled.encodable()),
    }


def _page(fields: Sequence[Any]) -> JournalPage:
    handles, reservation, state, settled, follower, total_entries, entries = fields
    status = ResponseStatus(
        ResponseState(state.decode()),
        reservation.decode(),
        _decode_counts(settled),
        _decode_handles(handles),
    )
    return JournalPage(status, follower.decode(), total_entries, entries)


async def _packed(head: ResponseHead) -> bytes:
    prompt_tokens = sum(len(job.rest) for job in head.jobs)
    if len(head.jobs) > JOBS_AT_ONCE or prompt_tokens > LONG_PROMPT_TOKENS:
        return await asyncio.to_thread(lambda: compressed(encode_head(head)))
    content = encode_head(head)
    if len(content) < THREAD_BYTES:
        return compressed(content)
    return await asyncio.to_thread(compressed, content)


async def _unpacked(content: bytes) -> ResponseHead:
    if not is_compressed(content):
        return decode_head(content)
    # It may be far longer than its compressed form.
    return await asyncio.to_thread(lambda: decode_head(restored(content)))


def _keys(request_id: str) -> dict[str, str]:
    return {"response": keys.response(request_id), "journal": keys.journal(request_id)}
