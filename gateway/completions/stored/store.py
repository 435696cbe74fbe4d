"""Responses in Redis: their content, with a typed method for each script.

The record of its request (`gateway.limits.store`) has a response's state, owner and term. Each
write of content is of a term, and is rejected if a later one has begun.
"""

import asyncio
import logging
from collections.abc import Sequence
from enum import Enum
from typing import Any, Final, NamedTuple

import msgspec

from contract import keys
from contract.messages import GenerationJob
from contract.queue import JOBS_AT_ONCE, LONG_PROMPT_TOKENS, JobQueue
from contract.scripts import CommandExecutor, LuaScript
from gateway.completions.stored.head import ResponseHead, decode_head, encode_head
from gateway.completions.stored.journal import compressed, is_compressed, restored
from gateway.limits.replies import RequestState, RequestStatus
from gateway.limits.store import QuotaStore
from gateway.limits.stored_bytes import allocated
from gateway.platform.concurrency.large_work import Beside
from gateway.records.principal import Principal

logger = logging.getLogger(__name__)

_PACKAGE = "gateway.completions.stored.scripts"
_OPEN = LuaScript("response_open", _PACKAGE)
_APPEND = LuaScript("response_append", _PACKAGE)
_ADOPT = LuaScript("response_adopt", _PACKAGE)
_READ = LuaScript("response_read", _PACKAGE)

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


class WriteResult(Enum):
    """Result of writing a response or its journal entries."""

    DONE = 1
    NOT_OWNER = 0  # Another gateway has taken the response over.
    MISSING = -1  # Redis has lost the response, or the end of its journal.


class JournalPage(NamedTuple):
    """A part of a response's journal."""

    gateway: str
    """Has the replies to `handles` in its stream, until a later owner has written."""
    handles: tuple[int, ...]
    """Handles of the jobs that it follows."""
    total_entries: int
    entries: list[bytes]


class StoredResponse(NamedTuple):
    """A response as stored in Redis when it was read."""

    head: ResponseHead
    head_bytes: int
    """What Redis stores of it beside the entries of its journal."""
    status: RequestStatus
    total_entries: int

    @property
    def id(self) -> str:
        """The request's id, which is also the id of the completion."""
        return self.head.request_id

    @property
    def state(self) -> RequestState:
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


class ResponseStore:
    """Operations on responses. All of them raise RedisError when Redis does not respond."""

    def __init__(self, executor: CommandExecutor, requests: QuotaStore) -> None:
        self._executor = executor
        self._requests = requests

    async def open(
        self,
        request_id: str,
        packed: bytes,
        *,
        term: int,
        gateway: str,
        handles: tuple[int, ...],
        ttl_ms: int,
        entries: Sequence[bytes] = (),
    ) -> WriteResult:
        """Write a whole response with its packed head, unless a later term has begun."""
        code = await _OPEN.run(
            self._executor,
            **_keys(request_id),
            term=term,
            ttl_ms=ttl_ms,
            head=packed,
            gateway=gateway,
            handles=_encode(handles),
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
        gateway: str,
        handles: tuple[int, ...],
        ttl_ms: int,
    ) -> WriteResult:
        """Write entries after the first `index` entries of the journal.

        Safe to repeat with the same entries, and with further ones after them.
        """
        code = await _APPEND.run(
            self._executor,
            **_keys(request_id),
            term=term,
            ttl_ms=ttl_ms,
            index=index,
            gateway=gateway,
            handles=_encode(handles),
            arguments=entries,
        )
        return WriteResult(code)

    async def adopt(self, request_id: str, packed: bytes, *, term: int, ttl_ms: int) -> bool:
        """Begin a term of a response's content. A paused response has a new head, `packed`.

        Return False if the content is gone, or a later term has begun.
        """
        adopted = await _ADOPT.run(
            self._executor, **_keys(request_id), term=term, ttl_ms=ttl_ms, head=packed
        )
        return bool(adopted)

    async def read(
        self, tenant_id: str, request_id: str, *, beside: Beside | None = None
    ) -> StoredResponse | None:
        """Return a tenant's response; None if it does not exist, or is deleted.

        Its head may be large: use `status` where that suffices. `beside` runs what a client's
        request needs. Raises what `Beside` raises.
        """
        status, fields = await asyncio.gather(
            self.status(tenant_id, request_id), self._read(request_id, 0, 0, with_head=True)
        )
        if status is None or status.state is RequestState.DELETED or not fields:
            return None
        packed = fields.pop()
        head = await self._with_prompts(await _unpacked(packed, beside))
        if head is None or head.tenant_id != tenant_id:
            return None
        return StoredResponse(head, bytes_of_head(packed), status, _page(fields).total_entries)

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

    async def status(self, tenant_id: str, request_id: str) -> RequestStatus | None:
        """Return the record of a response's request; None if it does not exist."""
        return await self._requests.read(tenant_id, request_id)

    async def stop(self, head: ResponseHead, term: int, state: RequestState) -> None:
        """Show a response as ended, while its jobs stop and it is not settled yet."""
        await self._requests.stop(head.tenant_id, head.request_id, term, state)

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

    async def discard(self, request_id: str) -> None:
        """Delete the content of a response."""
        await self._executor.execute_command("DEL", *_keys(request_id).values())


def _page(fields: Sequence[Any]) -> JournalPage:
    gateway, handles, total_entries, entries = fields
    return JournalPage(gateway.decode(), _decode_handles(handles), total_entries, entries)


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
    return {"content": keys.content(request_id), "journal": keys.journal(request_id)}
