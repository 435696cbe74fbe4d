"""Kept responses: the items of ended responses, which later requests of their project can name.

They are in the file store, never in Redis. A kept response is the row of a file, so it counts as
files do, and two objects: its input, written while it runs, and what it returned, written when it
ends. The row is written first and always expires, so `FileService.remove_old` also removes what a
gateway that was killed has left.
"""

import asyncio
import logging
import sys
import time
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple

import msgspec
from sqlalchemy import ColumnElement, case, func, insert, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from common.tasks import each_apart, wait_for_end
from gateway.completions.rendering.completion import Completion
from gateway.completions.settlement import SettlementService
from gateway.completions.stored.object_writer import ObjectWriter
from gateway.dialects.responses.items import as_items, listed_items
from gateway.dialects.responses.request import kept_options
from gateway.platform.blobs import Blobs, MissingBlobError
from gateway.platform.concurrency.large_work import Beside
from gateway.platform.database.engine import Database
from gateway.platform.database.tables import FileRow
from gateway.platform.settings import Settings
from gateway.records.batches import FilePurpose
from gateway.records.errors import (
    PayloadTooLargeError,
    StateConflictError,
    StoreUnavailableError,
)
from gateway.records.principal import Principal
from gateway.records.times import utc_now
from gateway.records.usage_record import UsageRecord

KEEP_SECONDS: Final = 1.0
"""How long the end of a response waits until it is kept. Writing continues after that."""
READS_AT_ONCE: Final = 16
SUM_SECONDS: Final = 10.0
"""How long the size of a tenant's files is remembered: there is a row for each kept response."""
MOST_SIZES: Final = 10_000

logger = logging.getLogger(__name__)


class Kept(NamedTuple):
    """The objects of a kept response, in JSON."""

    response: bytes
    """The response without the members of `ResponsesOptions.echo`."""
    input: bytes = b""
    """`items`, the whole conversation before the response, and `echo`; empty if it was not read."""


@dataclass(eq=False)
class KeptResponses:
    """Kept responses of all tenants."""

    _settings: Settings
    _database: Database
    _settlements: SettlementService

    def __post_init__(self) -> None:
        self._blobs = Blobs(self._settings.file_store)
        self._writer = ObjectWriter(self._settlements.tasks, "kept_response")
        self._begun: dict[str, asyncio.Task[None]] = {}
        """Tasks that write the inputs of responses."""
        self._sizes: dict[str, tuple[float, int]] = {}
        """By tenant, until when the bytes of its files are remembered, and these."""

    def begin(
        self, record: UsageRecord, completion: Completion, body: dict[str, Any], beside: Beside
    ) -> None:
        """Write the input of a response that runs, in a task, if the response is to be kept."""
        options, request_id = kept_options(completion.request), record.request_id
        if options is None:
            return

        def encoded() -> bytes:
            items = listed_items(as_items(body["input"]), request_id)
            return msgspec.json.encode({"items": items, "echo": msgspec.Raw(options.echo)})

        put = partial(self._put_input, record, completion.model)
        task = self._begun[request_id] = self._writer.write(beside(encoded), put)
        task.add_done_callback(lambda _: self._begun.pop(request_id, None))

    def finish(self, completion: Completion, whole: bytes) -> Awaitable[None] | None:
        """Keep a response that ends, if its input was written; wait for KEEP_SECONDS at most.

        If the store fails, the response is not kept, and its client is not disturbed. Return None
        if the response is not to be kept.
        """
        options, request_id = kept_options(completion.request), completion.id
        if options is None:
            return None

        async def made() -> bytes:
            if (begun := self._begun.get(request_id)) is not None:
                await asyncio.wait({begun})
            # The input has the echo, which requests that refer to an item need not read.
            return whole[: -len(options.echo)] + b"}"

        put = partial(self._put_response, request_id)
        writing = self._writer.write(made(), put)
        return wait_for_end(writing, timeout_seconds=KEEP_SECONDS)

    async def _put_input(self, record: UsageRecord, model: str, content: bytes) -> None:
        now = utc_now()
        row = {
            "id": record.request_id,
            "tenant_id": record.tenant_id,
            "project_id": record.project_id,
            "name": model,
            # Gateways of earlier releases read no other purposes.
            "purpose": FilePurpose.BATCH_OUTPUT,
            "size": len(content),
            "lines": 0,
            "parts": 0,
            "created_at": now,
            # Nothing else removes the input of a response that fails. Others may pause, and resume.
            "expires_at": now + 2 * self._settings.request_timeout,
            "is_visible": False,
        }
        async with self._database.writing() as transaction:
            await self._require_room(transaction, record.tenant_id, len(content))
            await transaction.execute(insert(FileRow).values(row))
        await self._put(record.request_id, "input", content)

    async def _require_room(self, transaction: AsyncSession, tenant_id: str, more: int) -> None:
        until, size = self._sizes.get(tenant_id, (0.0, 0))
        if until < time.monotonic():
            query = select(func.sum(FileRow.size)).where(FileRow.tenant_id == tenant_id)
            until, size = time.monotonic() + SUM_SECONDS, int(await transaction.scalar(query) or 0)
        has_room = size + more <= self._settings.max_file_bytes_of_tenant
        if len(self._sizes) > MOST_SIZES:
            self._sizes.clear()
        self._sizes[tenant_id] = until, size + more * has_room
        if not has_room:
            raise StateConflictError(f"The files of account {tenant_id} have no room.")

    async def _put_response(self, request_id: str, content: bytes) -> None:
        now = utc_now()
        change = {
            # A gateway that died may have begun to write it, and counted its bytes.
            "size": case((FileRow.is_visible, FileRow.size), else_=FileRow.size + len(content)),
            "is_visible": True,
            "expires_at": now + self._settings.responses_retention,
        }
        # Without a row, it had no room, or it was deleted.
        if await self._change(request_id, change, FileRow.expires_at > now, FileRow.size > 0):
            await self._put(request_id, "response", content)

    async def _put(self, request_id: str, name: str, content: bytes) -> None:
        """Write an object, whose row exists: nothing would remove an object without one."""
        try:
            await self._blobs.put(f"{request_id}/{name}", content)
        except StoreUnavailableError:
            await self._expire(request_id)
            raise

    async def remove(self, request_id: str) -> None:
        """Remove a response, also one that is not whole. Raises StoreUnavailableError.

        Background jobs remove the row, and the objects if that fails now.
        """
        if await self._expire(request_id):
            try:
                await self._blobs.delete_folder(request_id)
            except StoreUnavailableError as error:
                logger.warning("the response %s is removed later: %s", request_id, error)

    async def _expire(self, request_id: str) -> bool:
        expired = {"size": 0, "is_visible": False, "expires_at": utc_now()}
        return await self._change(request_id, expired)

    async def _change(
        self, request_id: str, values: dict[str, Any], *conditions: ColumnElement[bool]
    ) -> bool:
        """Change a row; return whether it exists and has these conditions."""
        query = update(FileRow).where(FileRow.id == request_id, *conditions).values(values)
        async with self._database.writing() as transaction:
            return (await transaction.execute(query.returning(FileRow.id))).first() is not None

    async def find(
        self,
        principal: Principal,
        wanted: Mapping[str, bool],
        *,
        most_bytes: int = sys.maxsize,
    ) -> dict[str, Kept]:
        """Return the wanted responses that the caller may read, if true with their input.

        Raises StoreUnavailableError, and PayloadTooLargeError if they have too many bytes.
        """
        found, total = dict[str, Kept](), 0
        conditions = [
            FileRow.id.in_(wanted),
            FileRow.tenant_id == principal.tenant_id,
            FileRow.is_visible.is_(True),
            FileRow.expires_at > utc_now(),
        ]
        if principal.project_id is not None:
            conditions.append(FileRow.project_id == principal.project_id)
        if not self._settings.keeps_responses:
            return found
        async with self._database.reading() as transaction:
            query = select(FileRow.id, FileRow.name).where(*conditions)
            rows = [*await transaction.execute(query)]

        async def read(request_id: str) -> None:
            nonlocal total
            if total > most_bytes:
                return
            try:
                response = await self._blobs.read(f"{request_id}/response")
                given = b""
                if wanted[request_id]:
                    given = await self._blobs.read(f"{request_id}/input")
            except MissingBlobError:
                return  # It was removed a moment ago.
            found[request_id] = Kept(response, given)
            total += len(response) + len(given)

        readable = [id_ for id_, model in rows if principal.allows_model(model)]
        await each_apart(read, readable, at_once=READS_AT_ONCE)
        if total > most_bytes:
            rule = f"They must have at most {most_bytes} bytes. Given: at least {total}."
            raise PayloadTooLargeError(rule)
        return found
