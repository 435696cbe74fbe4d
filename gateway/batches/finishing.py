"""Task: end batches whose lines have all ended, were cancelled or have expired."""

import time
from asyncio import to_thread
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from itertools import chain
from typing import Any, Final

from sqlalchemy import ColumnElement, and_, delete, or_
from sqlalchemy.ext.asyncio import AsyncSession

from gateway.accounts.webhooks.service import EventName, add_events, make_event, webhooks_of
from gateway.batches.file_checker import error_of
from gateway.batches.files.service import FileService, FileStore
from gateway.batches.lines import CANCELLED, EXPIRED, Result, custom_id_of, line_id_of, unfinished
from gateway.batches.results import ResultFiles, error_id_of, output_id_of
from gateway.batches.slots import BatchSlots
from gateway.batches.store import RUNNING, BatchStore
from gateway.platform.database.engine import Database
from gateway.platform.database.tables import BatchChunkRow, BatchRow
from gateway.records.batches import Batch, BatchStatus, Chunk
from gateway.records.times import utc_now


async def add_end_events(transaction: AsyncSession, batch: Batch) -> None:
    """Add an event about an ended batch for each webhook of its tenant."""
    kind, webhooks = f"batch.{batch.status}", await webhooks_of(transaction, batch.tenant_id)
    data: dict[str, object] = {
        "id": batch.id,
        "status": batch.status,
        "output_file_id": batch.output_file_id,
        "error_file_id": batch.error_file_id,
        "request_counts": {
            "total": batch.total,
            "completed": batch.completed,
            "failed": batch.failed,
        },
        "metadata": batch.labels,
    }
    names = [EventName(webhook.id, kind, batch.id, "", 0) for webhook in webhooks]
    await add_events(transaction, [make_event(name, batch.tenant_id, data) for name in names])


BATCHES_AT_ONCE: Final = 4
MOST_ATTEMPTS: Final = 9
"""Attempts to merge the objects of result files."""
CHUNKS_AT_ONCE: Final = 200
"""Chunks whose lines get their errors in one turn of their batch."""
JOINED_BYTES: Final = 4 * 1024 * 1024
"""Bytes of chunks that are read at once."""
MERGED_AT: Final = 64
"""Objects of a growing result file that are merged."""
MERGE_SECONDS: Final = 30.0
"""How often the objects of growing result files are merged."""
SLICE_SECONDS: Final = 1.0
"""How long the objects of one batch are merged before another batch has its turn."""
WAIT_SECONDS: Final = 1.0
"""How often a batch is looked at whose last lines gateways are ending."""
GIVE_UP: Final = timedelta(hours=1)
"""How long a batch waits for results that cannot be stored, because files are unavailable."""

_NOT_VALIDATED: Final = "The completion window ended before the input file was validated."


class Finisher(BatchSlots):
    """Ends batches. Two runs at once, or one that dies, end each line once."""

    def __init__(self, database: Database, files: FileService) -> None:
        super().__init__(database, self._advance, _is_due, number=BATCHES_AT_ONCE)
        self._files = files
        self._results = ResultFiles(database, files)

    async def _advance(self, batch: Batch) -> float:
        """Do a part of what is due for a batch; return the seconds until it is due again."""
        now, is_done = utc_now(), batch.completed + batch.failed >= batch.total
        match batch.status:
            case BatchStatus.VALIDATING:
                error = error_of(_NOT_VALIDATED, EXPIRED, None, None)
                await self._finalize(batch, now, expired_at=now, errors=[error])
            case BatchStatus.IN_PROGRESS if is_done:
                await self._finalize(batch, now)
            case BatchStatus.IN_PROGRESS if batch.expires_at <= now:
                await self._finalize(batch, now, expired_at=now)
            case BatchStatus.IN_PROGRESS:
                is_merged = await self._merge(batch, at_least=MERGED_AT)
                return MERGE_SECONDS if is_merged else 0.0
            case _:
                if not is_done and (pause := await self._end_lines(batch, now)) is not None:
                    return pause
                # Results that cannot be merged are complete nevertheless.
                if batch.attempts > MOST_ATTEMPTS or await self._merge(batch):
                    await self._end_batch(batch.id)
        return 0.0

    async def _finalize(self, batch: Batch, now: datetime, **columns: Any) -> None:
        async with self._database.writing() as transaction:
            store = BatchStore(transaction)
            if (await store.lock(batch.id)).status is batch.status:
                status = BatchStatus.FINALIZING
                await store.change(batch.id, status=status, finalizing_at=now, **columns)

    async def _merge(self, batch: Batch, *, at_least: int = 2) -> bool:
        """Merge objects of result files; return False if there are more."""
        until = time.monotonic() + SLICE_SECONDS
        for file_id in (output_id_of(batch), error_id_of(batch)):
            while await self._files.merge_parts(file_id, at_least=at_least):
                if time.monotonic() > until:
                    return False
        return True

    # -- lines that do not run -------------------------------------------------------------------

    async def _end_lines(self, batch: Batch, now: datetime) -> float | None:
        """End some of the lines that no gateway has run. Gateways end the others.

        Return the seconds until the batch is due again, or None if all lines have ended.
        """
        ending_since = batch.cancelling_at or batch.finalizing_at or now
        async with self._database.writing() as transaction:
            store = BatchStore(transaction)
            chunks = await store.claim_unclaimed(batch.id, now, limit=CHUNKS_AT_ONCE)
            left = chunks or await store.open_chunks(batch.id, limit=CHUNKS_AT_ONCE)
        if not left:
            return None
        if now - ending_since > GIVE_UP:
            await self._results.lose(batch, left)
        elif chunks:
            results = [await self._unfinished(batch, some) for some in joined(chunks)]
            await self._results.add(batch, chunks, list(chain.from_iterable(results)))
        else:
            return WAIT_SECONDS
        return 0.0

    async def _unfinished(self, batch: Batch, chunk: Chunk) -> list[Result]:
        content = await self._files.reader.read(batch.input_file_id, chunk.start, chunk.size)
        return await to_thread(_results_of, batch, chunk, content)

    # -- the end ---------------------------------------------------------------------------------

    async def _end_batch(self, batch_id: str) -> None:
        now = utc_now()
        async with self._database.writing() as transaction:
            store = BatchStore(transaction)
            batch = await store.lock(batch_id)
            if batch.status.is_end:
                return
            ended = await store.change(batch_id, **_end_columns(batch, now))
            of_batch = BatchChunkRow.batch_id == batch_id
            await transaction.execute(delete(BatchChunkRow).where(of_batch))
            seconds = batch.output_seconds
            retention = self._files.retention if seconds is None else timedelta(seconds=seconds)
            for file_id in (batch.output_file_id, batch.error_file_id):
                if file_id is not None:
                    await FileStore(transaction).change(file_id, expires_at=now + retention)
            await add_end_events(transaction, ended)


def _is_due(now: datetime) -> ColumnElement[bool]:
    status, is_over = BatchRow.status, BatchRow.expires_at <= now
    is_done = BatchRow.completed + BatchRow.failed >= BatchRow.total
    return or_(
        and_(status.in_(RUNNING), BatchRow.due_at <= now),
        and_(status == BatchStatus.IN_PROGRESS, or_(is_done, is_over)),
        and_(status == BatchStatus.VALIDATING, is_over),
    )


def _results_of(batch: Batch, chunk: Chunk, content: bytes) -> list[Result]:
    code = end_code_of(batch)
    return [
        unfinished(line_id_of(batch.id, number), custom_id_of(line), code)
        for number, line in numbered(chunk, content)
    ]


def joined(chunks: Sequence[Chunk]) -> list[Chunk]:
    """Join chunks that follow each other to some of at most JOINED_BYTES, to read them at once."""
    joined: list[Chunk] = []
    for chunk in chunks:
        last = joined[-1] if joined else None
        if (
            last is None
            or last.start + last.size != chunk.start
            or last.size + chunk.size > JOINED_BYTES
        ):
            joined.append(chunk)
        else:
            size, lines = last.size + chunk.size, last.lines + chunk.lines
            joined[-1] = replace(last, size=size, lines=lines)
    return joined


def end_code_of(batch: Batch) -> str:
    """Return the error code of the lines of a batch that do not run any more."""
    return CANCELLED if batch.cancelling_at is not None else EXPIRED


def numbered(chunk: Chunk, content: bytes) -> Sequence[tuple[int, bytes]]:
    """Return the lines in the content of a chunk with their numbers."""
    return list(enumerate(content.removesuffix(b"\n").split(b"\n"), start=chunk.first_line))


def _end_columns(batch: Batch, now: datetime) -> dict[str, Any]:
    if batch.cancelling_at is not None:
        return {"status": BatchStatus.CANCELLED, "cancelled_at": now}
    if batch.expired_at is not None:
        return {"status": BatchStatus.EXPIRED}
    return {"status": BatchStatus.COMPLETED, "completed_at": now}
