"""Result files of batches: each chunk adds its results once, however often it runs."""

import hashlib
from collections.abc import Sequence
from contextlib import suppress
from typing import Final, NamedTuple

from sqlalchemy.exc import NoResultFound
from sqlalchemy.ext.asyncio import AsyncSession

from gateway.batches.file_checker import MAX_ERRORS, UNREADABLE_CODE, error_of
from gateway.batches.files.service import FileService, FileStore
from gateway.batches.lines import Result
from gateway.batches.store import BatchStore, Progress
from gateway.platform.database.engine import Database
from gateway.records.batches import Batch, Chunk, File, FilePurpose
from gateway.records.times import utc_now

OBJECT_BYTES: Final = 8 * 1024 * 1024
"""An object of a result file ends with the line that reaches this size."""


class _Written(NamedTuple):
    """Objects that are not part of their file yet."""

    file_id: str
    parts: list[tuple[str, int]]
    lines: int


class ResultFiles:
    """The result files of all batches."""

    def __init__(self, database: Database, files: FileService) -> None:
        self._database = database
        self._files = files

    async def add(
        self,
        batch: Batch,
        chunks: Sequence[Chunk],
        results: Sequence[Result],
        *,
        rest: Sequence[Chunk] = (),
        gateway: str = "",
    ) -> bool:
        """Add the results of chunks to the files of their batch, and count them.

        Return False, and add nothing, if the results of any chunk were added before. `rest` and
        `gateway` are passed to `BatchStore.finish_chunks`. Raises StoreUnavailableError.
        """
        good = [each.content for each in results if each.is_success]
        bad = [each.content for each in results if not each.is_success]
        output = await self._write(output_id_of(batch), good)
        errors = await self._write(error_id_of(batch), bad)
        progress = _progress(results)
        is_new = False
        # A batch that has ended may be deleted while a gateway still runs lines of it.
        with suppress(NoResultFound):
            async with self._database.writing() as transaction:
                batches = BatchStore(transaction)
                batch = await batches.lock(batch.id)
                is_new = not batch.status.is_end and await batches.finish_chunks(
                    chunks, progress, rest=rest, gateway=gateway
                )
                if not is_new:
                    await transaction.rollback()
                if is_new and good:
                    await _append(transaction, batch, output, name=f"{batch.id}_output.jsonl")
                    await batches.change(batch.id, output_file_id=output.file_id)
                if is_new and bad:
                    await _append(transaction, batch, errors, name=f"{batch.id}_error.jsonl")
                    await batches.change(batch.id, error_file_id=errors.file_id)
        if not is_new:
            await self._files.discard([key for key, _ in (*output.parts, *errors.parts)])
        return is_new

    async def lose(self, batch: Batch, chunks: Sequence[Chunk]) -> None:
        """Count the lines of chunks as failed without results, and name them in the batch."""
        lines = sum(chunk.lines for chunk in chunks)
        async with self._database.writing() as transaction:
            batches = BatchStore(transaction)
            batch = await batches.lock(batch.id)
            if batch.status.is_end or not await batches.finish_chunks(
                chunks, Progress(failed=lines)
            ):
                await transaction.rollback()
                return
            message = f"{lines} lines have no result, because a file was unavailable."
            lost = error_of(message, UNREADABLE_CODE, None, chunks[0].first_line)
            await batches.change(batch.id, errors=[*(batch.errors or ()), lost][:MAX_ERRORS])

    async def _write(self, file_id: str, lines: Sequence[bytes]) -> _Written:
        parts: list[tuple[str, int]] = []
        held, size = list[bytes](), 0
        for number, line in enumerate(lines, start=1):
            held.append(line)
            size += len(line)
            if number == len(lines) or size >= OBJECT_BYTES:
                parts.append((await self._files.put(file_id, b"".join(held)), size))
                held, size = [], 0
        return _Written(file_id, parts, len(lines))


def output_id_of(batch: Batch) -> str:
    """Return the id of a batch's output file, which exists as soon as a line has succeeded."""
    return _file_id(batch, "output")


def error_id_of(batch: Batch) -> str:
    """Return the id of a batch's error file, which exists as soon as a line has failed."""
    return _file_id(batch, "error")


def _file_id(batch: Batch, kind: str) -> str:
    # The id of a batch is unguessable, and so is this one.
    return f"file-{hashlib.sha256(f'{batch.id} {kind}'.encode()).hexdigest()[:32]}"


async def _append(transaction: AsyncSession, batch: Batch, written: _Written, *, name: str) -> None:
    store = FileStore(transaction)
    if not await store.append(written.file_id, written.parts, lines=written.lines):
        file = File(
            id=written.file_id,
            tenant_id=batch.tenant_id,
            project_id=batch.project_id,
            name=name,
            purpose=FilePurpose.BATCH_OUTPUT,
            size=0,
            lines=0,
            created_at=utc_now(),
            expires_at=None,  # It is set when the batch ends.
        )
        await store.add(file, is_visible=True)
        await store.append(written.file_id, written.parts, lines=written.lines)


def _progress(results: Sequence[Result]) -> Progress:
    completed = sum(each.is_success for each in results)
    sums = {
        name: sum(getattr(each, name) for each in results)
        for name in Progress._fields
        if name.endswith(("_tokens", "_micros"))
    }
    unfinished = sum(each.is_unfinished for each in results)
    failed = len(results) - completed
    return Progress(completed=completed, failed=failed, unfinished=unfinished, **sums)
