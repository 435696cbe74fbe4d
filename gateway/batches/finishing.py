"""Task: end batches whose lines have all ended, were cancelled or have expired."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from itertools import chain
from typing import Any, Final

from gateway.batches.events import add_events
from gateway.batches.lines import (
    CANCELLED,
    EXPIRED,
    Result,
    custom_id_of,
    line_id_of,
    unfinished,
)
from gateway.batches.results import ResultFiles, error_id_of, output_id_of
from gateway.batches.store import BatchStore
from gateway.batches.validation import CHUNK_LINES
from gateway.database.engine import Database
from gateway.files.service import FileService
from gateway.files.store import FileStore
from gateway.tenancy.batches import Batch, BatchStatus, Chunk
from gateway.tenancy.times import utc_now

BATCHES_AT_ONCE: Final = 1_000
CHUNKS_AT_ONCE: Final = 500
"""Chunks whose lines get their errors in one transaction."""
JOINED_BYTES: Final = 4 * 1024 * 1024
"""Bytes of chunks that are read at once."""
MERGED_AT: Final = 64
"""Objects of a growing result file that are merged."""


class Finisher:
    """Ends batches. Two runs at once, or one that dies, end each line once."""

    def __init__(self, database: Database, files: FileService) -> None:
        self._database = database
        self._files = files
        self._results = ResultFiles(database, files)
        self._merged: dict[str, int] = {}
        """Lines of each running batch that had ended when its results were last merged."""

    async def run(self) -> int:
        """End what is due; return how many batches have ended. Raises StoreUnavailableError."""
        states = (BatchStatus.IN_PROGRESS, BatchStatus.CANCELLING, BatchStatus.FINALIZING)
        async with self._database.reading() as transaction:
            batches = await BatchStore(transaction).in_states(states, limit=BATCHES_AT_ONCE)
        running = {batch.id for batch in batches}
        self._merged = {each: ended for each, ended in self._merged.items() if each in running}
        return sum([await self._advance(batch) for batch in batches])

    async def _advance(self, batch: Batch) -> bool:
        """Do what is due for a batch; return whether it has ended."""
        now = utc_now()
        if batch.completed + batch.failed < batch.total:
            if batch.status is BatchStatus.IN_PROGRESS and batch.expires_at <= now:
                await self._set(batch, BatchStatus.FINALIZING, finalizing_at=now, expired_at=now)
                return False
            if batch.status is BatchStatus.IN_PROGRESS:
                await self._merge_some(batch)
                return False
            await self._end_unclaimed(batch)
            async with self._database.reading() as transaction:
                if not await BatchStore(transaction).is_done(batch.id):
                    return False
        if batch.status is BatchStatus.IN_PROGRESS:
            await self._set(batch, BatchStatus.FINALIZING, finalizing_at=now)
        await self._merge(batch)
        return await self._end(batch.id)

    async def _set(self, batch: Batch, status: BatchStatus, **columns: Any) -> None:
        async with self._database.writing() as transaction:
            store = BatchStore(transaction)
            if (await store.lock(batch.id)).status is batch.status:
                await store.change(batch.id, status=status, **columns)

    async def _merge_some(self, batch: Batch) -> None:
        """Merge results if there may be enough new objects."""
        ended = batch.completed + batch.failed
        if ended - self._merged.get(batch.id, 0) >= MERGED_AT * CHUNK_LINES:
            self._merged[batch.id] = ended
            await self._merge(batch, at_least=MERGED_AT)

    async def _merge(self, batch: Batch, *, at_least: int = 2) -> None:
        for file_id in (output_id_of(batch), error_id_of(batch)):
            while await self._files.merge_parts(file_id, at_least=at_least):
                pass

    # -- lines that do not run -------------------------------------------------------------------

    async def _end_unclaimed(self, batch: Batch) -> None:
        """End the lines that no gateway has run. Gateways end the others."""
        while True:
            async with self._database.writing() as transaction:
                chunks = await BatchStore(transaction).claim_unclaimed(
                    batch.id, utc_now(), limit=CHUNKS_AT_ONCE
                )
            if chunks:
                results = [await self._unfinished(batch, some) for some in _joined(chunks)]
                await self._results.add(batch, chunks, list(chain.from_iterable(results)))
            if len(chunks) < CHUNKS_AT_ONCE:
                return

    async def _unfinished(self, batch: Batch, chunk: Chunk) -> list[Result]:
        content = await self._files.reader.read(batch.input_file_id, chunk.start, chunk.size)
        code = end_code_of(batch)
        return [
            unfinished(line_id_of(batch.id, number), custom_id_of(line), code)
            for number, line in numbered(chunk, content)
        ]

    # -- the end ---------------------------------------------------------------------------------

    async def _end(self, batch_id: str) -> bool:
        now = utc_now()
        async with self._database.writing() as transaction:
            store = BatchStore(transaction)
            batch = await store.lock(batch_id)
            if batch.status.is_end:
                return False
            await store.change(batch_id, **_end_columns(batch, now))
            await store.remove_chunks(batch_id)
            seconds = batch.output_seconds
            retention = (
                self._files.limits.retention if seconds is None else timedelta(seconds=seconds)
            )
            for file_id in (batch.output_file_id, batch.error_file_id):
                if file_id is not None:
                    await FileStore(transaction).change(file_id, expires_at=now + retention)
            await add_events(transaction, await store.lock(batch_id))
        return True


def _joined(chunks: Sequence[Chunk]) -> list[Chunk]:
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
