"""Files of tenants: uploads, results of batches, reading, and removal."""

import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from typing import Any, Final, NamedTuple

from sqlalchemy import ColumnElement, and_, delete, exists, func, insert, or_, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from common.not_none import not_none
from common.tasks import each_apart
from gateway.platform.blobs import Blobs, MissingBlobError
from gateway.platform.database.claims import lock_in_turns, lock_tenant
from gateway.platform.database.engine import Database
from gateway.platform.database.paging import Page, PageRequest, find_record, read_page
from gateway.platform.database.tables import BatchRow, FilePartRow, FileRow
from gateway.platform.settings import Settings
from gateway.records.batches import ENDED, BatchStatus, File, FilePurpose
from gateway.records.errors import (
    NotFoundError,
    StateConflictError,
    StoreUnavailableError,
    must,
    shown,
)
from gateway.records.times import utc_now


class FilePart(NamedTuple):
    """An object that contains a part of a file."""

    key: str
    start: int
    """Bytes of the file before it."""
    size: int


class TenantUse(NamedTuple):
    """What all files of a tenant take."""

    size: int
    lines: int


@dataclass(frozen=True, slots=True)
class Owner:
    """A tenant, or one of its projects, whose files and batches a caller may use."""

    tenant_id: str
    project_id: str | None = None
    """Restricts the caller to this project."""

    def conditions(self, table: type[FileRow] | type[BatchRow]) -> list[ColumnElement[bool]]:
        """Return the conditions for the rows that the caller may use."""
        of_tenant = table.tenant_id == self.tenant_id
        if self.project_id is None:
            return [of_tenant]
        return [of_tenant, table.project_id == self.project_id]


class FileStore:
    """Files, within one transaction."""

    def __init__(self, transaction: AsyncSession) -> None:
        self._transaction = transaction

    async def add(self, file: File, *, is_visible: bool) -> None:
        """Insert a file without parts."""
        self._transaction.add(FileRow(**asdict(file), parts=0, is_visible=is_visible))
        await self._transaction.flush()

    async def use_of(self, tenant_id: str) -> TenantUse:
        """Return what all files of a tenant take."""
        row = await self._transaction.execute(
            select(func.sum(FileRow.size), func.sum(FileRow.lines)).where(
                FileRow.tenant_id == tenant_id
            )
        )
        return TenantUse(*(int(value or 0) for value in row.one()))

    async def append(self, file_id: str, parts: Sequence[tuple[str, int]], *, lines: int) -> bool:
        """Append objects, given as key and bytes, to a file. Return False if it is deleted.

        Appends to one file run one after the other.
        """
        row = await self._transaction.scalar(
            select(FileRow).where(FileRow.id == file_id).with_for_update()
        )
        if row is None:
            return False
        start, rows = row.size, []
        for number, (key, size) in enumerate(parts, start=row.parts):
            values = {"number": number, "key": key, "start": start, "size": size}
            rows.append({"file_id": file_id, **values})
            start += size
        if rows:
            await self._transaction.execute(insert(FilePartRow), rows)
        row.size, row.lines, row.parts = start, row.lines + lines, row.parts + len(rows)
        await self._transaction.flush()
        return True

    async def change(self, file_id: str, **columns: Any) -> None:
        """Change columns of a file."""
        await self._transaction.execute(
            update(FileRow).where(FileRow.id == file_id).values(**columns)
        )

    async def parts(self, file_id: str, *, start: int, limit: int) -> list[FilePart]:
        """Return parts of a file, beginning with the one that contains byte `start`."""
        rows = await self._transaction.execute(
            select(FilePartRow.key, FilePartRow.start, FilePartRow.size)
            .where(FilePartRow.file_id == file_id, FilePartRow.start + FilePartRow.size > start)
            .order_by(FilePartRow.start)
            .limit(limit)
        )
        return [FilePart(*row) for row in rows]

    async def merge(self, file_id: str, parts: Sequence[FilePart], key: str) -> bool:
        """Replace parts that follow each other by one. Return False if they do not exist."""
        first, last = parts[0], parts[-1]
        is_of = FilePartRow.file_id == file_id
        removed = await self._transaction.scalars(
            delete(FilePartRow)
            .where(is_of, FilePartRow.start.between(first.start, last.start))
            .returning(FilePartRow.number)
        )
        numbers = sorted(removed)
        if len(numbers) != len(parts):
            return False
        size = sum(part.size for part in parts)
        values = {"number": numbers[0], "key": key, "start": first.start, "size": size}
        await self._transaction.execute(insert(FilePartRow), [{"file_id": file_id, **values}])
        return True

    async def remove(self, file_id: str) -> None:
        """Remove a file and its parts, whose objects are deleted already."""
        await self._transaction.execute(delete(FilePartRow).where(FilePartRow.file_id == file_id))
        await self._transaction.execute(delete(FileRow).where(FileRow.id == file_id))


def _is_used_by(*batches: ColumnElement[bool]) -> ColumnElement[bool]:
    is_open = BatchRow.status.not_in(ENDED)
    return exists().where(BatchRow.tenant_id == FileRow.tenant_id, is_open, *batches)


_IS_INPUT: Final = BatchRow.input_file_id == FileRow.id
_IS_RESULT: Final = or_(BatchRow.output_file_id == FileRow.id, BatchRow.error_file_id == FileRow.id)
_IS_IN_USE: Final = _is_used_by(or_(_IS_INPUT, _IS_RESULT))
_IS_NEEDED: Final = _is_used_by(
    or_(
        _IS_RESULT,
        and_(_IS_INPUT, BatchRow.status.in_((BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS))),
    )
)
"""A batch that has not ended needs a file whose lines it runs, and a file that it writes. One that
ends only names the lines of its input: the file may be deleted, and is then removed when the batch
has ended."""

_IS_FILE: Final = FileRow.id.startswith("file-")
"""Other rows are kept responses (`gateway.completions.stored.kept`)."""

PARTS_AT_ONCE = 100
"""Parts of a file that one query returns."""
READ_BYTES = 1024 * 1024
"""Bytes of a file that are in memory at once."""
ATTEMPTS = 3
"""How often the parts of a file are read again because they have been merged."""


class FileReader:
    """Reads files in pieces. All methods raise StoreUnavailableError."""

    def __init__(self, database: Database, blobs: Blobs) -> None:
        self._database = database
        self._blobs = blobs

    async def read(self, file_id: str, start: int, size: int) -> bytes:
        """Return bytes of a file; fewer if the file ends, or was deleted, before."""
        return b"".join([piece async for piece in self.pieces(file_id, start, start + size)])

    async def pieces(self, file_id: str, start: int, end: int) -> AsyncIterator[bytes]:
        """Yield the bytes from `start` up to `end`, at most READ_BYTES at once."""
        failures = 0
        while start < end:
            try:
                async for piece in self._pieces(file_id, start, end):
                    yield piece
                    start += len(piece)
                    failures = 0
                return
            except MissingBlobError:
                # The part was merged into a larger one, or the file was deleted.
                failures += 1
                if failures >= ATTEMPTS:
                    raise StoreUnavailableError(
                        "The file cannot be read.", detail=f"An object of {file_id} is missing."
                    ) from None

    async def _pieces(self, file_id: str, start: int, end: int) -> AsyncIterator[bytes]:
        while start < end and (parts := await self._parts(file_id, start)):
            for part in parts:
                part_end = min(part.start + part.size, end)
                while start < part_end:
                    size = min(READ_BYTES, part_end - start)
                    yield await self._blobs.get(part.key, start - part.start, size)
                    start += size

    async def _parts(self, file_id: str, start: int) -> list[FilePart]:
        async with self._database.reading() as transaction:
            return await FileStore(transaction).parts(file_id, start=start, limit=PARTS_AT_ONCE)

    async def lines(self, file_id: str, size: int) -> AsyncIterator[list[bytes]]:
        """Yield the lines of a file of `size` bytes in lists, without their line ends.

        A list has the lines that end in one piece; none is empty. A last line without a line end
        counts.
        """
        rest: list[bytes] = []
        async for piece in self.pieces(file_id, 0, size):
            first, *others = piece.split(b"\n")
            rest.append(first)
            if others:
                yield [b"".join(rest), *others[:-1]]
                rest = [others[-1]]
        if last := b"".join(rest):
            yield [last]


UPLOAD_LIMIT: Final = timedelta(hours=24)
"""After this time an upload counts as abandoned."""
MIN_RETENTION_SECONDS: Final = 3600
MAX_RETENTION_SECONDS: Final = 2_592_000
"""Bounds of `expires_after.seconds`, as in OpenAI's API."""
REMOVAL: Final = timedelta(hours=1)
"""After this time the removal of a file is tried again."""
REMOVED_AT_ONCE: Final = 100
REMOVALS_AT_ONCE: Final = 8
MERGED_BYTES: Final = 8 * 1024 * 1024
"""Bytes of the objects into which smaller ones are merged."""
MERGED_PARTS: Final = 64
"""Objects that are merged at once."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Bound:
    """The most bytes or lines that a file may have."""

    most: int
    message: str
    """Names the limit: of a file, or of all files of the tenant."""

    @classmethod
    def of(cls, unit: str, most: int, *, of_tenant: int, used: int) -> "Bound":
        """Return the smaller one of a file's limit and of what is left to its tenant."""
        left = of_tenant - used
        if left < most:
            return cls(
                left,
                f"The files of an account must have at most {of_tenant} {unit}, "
                f"of which {left} are left.",
            )
        return cls(most, f"The file must have at most {most} {unit}.")


class FileService:
    """Files of all tenants. All methods raise StoreUnavailableError."""

    def __init__(self, settings: Settings, database: Database) -> None:
        self._settings = settings
        self._database = database
        self._blobs = Blobs(settings.file_store)
        self.reader = FileReader(database, self._blobs)
        self.retention = settings.file_retention

    # -- for customers ---------------------------------------------------------------------------

    async def get(self, owner: Owner, file_id: str, *, param: str | None = None) -> File:
        """Return a file. Raises NotFoundError, which names the parameter that has the id."""
        file = None
        if is_id(file_id):
            async with self._database.reading() as transaction:
                file = await find_record(transaction, FileRow, *_visible(owner, file_id))
        if file is None:
            of_param = "" if param is None else f" in '{param}'"
            raise NotFoundError(
                f"The file {shown(file_id)}{of_param} does not exist or has expired.", param=param
            )
        return file

    async def page(
        self, owner: Owner, wanted: PageRequest, *, purpose: FilePurpose | None = None
    ) -> Page[File]:
        """Return a page of files. Raises InvalidParameterError for an unknown `after`."""
        conditions = [*owner.conditions(FileRow), FileRow.is_visible.is_(True), _IS_FILE]
        if purpose is not None:
            conditions.append(FileRow.purpose == purpose)
        async with self._database.reading() as transaction:
            return await read_page(transaction, FileRow, wanted, *conditions)

    async def delete(self, owner: Owner, file_id: str) -> None:
        """Delete a file. Raises NotFoundError, and StateConflictError if a batch still uses it."""
        await self.get(owner, file_id)
        now = utc_now()
        async with self._database.writing() as transaction:
            use = select(_IS_NEEDED, _IS_IN_USE).where(FileRow.id == file_id)
            found = await transaction.execute(use)
            is_needed, is_in_use = found.one_or_none() or (False, False)
            if is_needed:
                raise StateConflictError(
                    f"The file {shown(file_id)} belongs to a batch that has not ended. "
                    "Cancel the batch first."
                )
            expiry = now if is_in_use else now + REMOVAL
            await FileStore(transaction).change(file_id, is_visible=False, expires_at=expiry)
        if is_in_use:
            return
        try:
            await self.remove(file_id)
        except StoreUnavailableError as error:
            logger.warning("the file %s is removed later: %s", file_id, error)

    async def require_room(self, tenant_id: str) -> tuple[Bound, Bound]:
        """Return the bounds of the bytes and lines of the tenant's next file.

        Raises StateConflictError if the tenant has the maximum already.
        """
        self._blobs.require()
        async with self._database.reading() as transaction:
            used = await FileStore(transaction).use_of(tenant_id)
        of = self._settings
        size = Bound.of(
            "bytes", of.max_file_bytes, of_tenant=of.max_file_bytes_of_tenant, used=used.size
        )
        lines = Bound.of(
            "lines", of.max_file_lines, of_tenant=of.max_file_lines_of_tenant, used=used.lines
        )
        if size.most <= 0 or lines.most <= 0:
            raise self._full(used.size, used.lines)
        return size, lines

    def _full(self, size: int, lines: int) -> StateConflictError:
        most = self._settings
        return StateConflictError(
            "The files of an account must have at most "
            f"{most.max_file_bytes_of_tenant} bytes and {most.max_file_lines_of_tenant} lines. "
            f"Given: {size} bytes, {lines} lines, kept responses included. Delete some first."
        )

    # -- contents --------------------------------------------------------------------------------

    async def begin_upload(self, owner: Owner) -> File:
        """Create an empty file, which is invisible until the upload is complete."""
        file = File(
            id=f"file-{secrets.token_hex(16)}",
            tenant_id=owner.tenant_id,
            project_id=owner.project_id,
            name="",
            purpose=FilePurpose.BATCH,
            size=0,
            lines=0,
            created_at=utc_now(),
            expires_at=None,
        )
        async with self._database.writing() as transaction:
            await FileStore(transaction).add(file, is_visible=False)
        return file

    async def put(self, file_id: str, content: bytes) -> str:
        """Write an object of a file, which does not belong to the file yet. Return its key."""
        key = f"{file_id}/{secrets.token_hex(8)}"
        await self._blobs.put(key, content)
        return key

    async def discard(self, keys: list[str]) -> None:
        """Delete objects that belong to no file."""
        await self._blobs.delete(keys)

    async def finish_upload(
        self,
        file: File,
        parts: Sequence[tuple[str, int]],
        *,
        name: str,
        lines: int,
        retention: timedelta | None,
        also: Callable[[AsyncSession], Awaitable[None]] | None = None,
    ) -> File:
        """Make an uploaded file visible, with these objects; `also` runs in the same transaction.

        Raises StateConflictError, and what `also` raises.
        """
        retention = self.retention if retention is None else retention
        async with self._database.writing() as transaction:
            await lock_tenant(transaction, file.tenant_id)
            store = FileStore(transaction)
            await store.append(file.id, parts, lines=lines)
            used = await store.use_of(file.tenant_id)
            most = self._settings
            if (
                used.size > most.max_file_bytes_of_tenant
                or used.lines > most.max_file_lines_of_tenant
            ):
                raise self._full(used.size, used.lines)
            await store.change(
                file.id, name=name, is_visible=True, expires_at=file.created_at + retention
            )
            if also is not None:
                await also(transaction)
            uploaded = _visible(Owner(file.tenant_id), file.id)
            found = await find_record(transaction, FileRow, *uploaded)
        return not_none(found)

    # -- removal and merging ---------------------------------------------------------------------

    async def remove(self, file_id: str) -> None:
        """Remove a file with its objects. Safe to repeat."""
        await self._blobs.delete_folder(file_id)
        async with self._database.writing() as transaction:
            await FileStore(transaction).remove(file_id)

    async def remove_old(self) -> int:
        """Remove expired files and abandoned uploads; return how many.

        One that cannot be removed is tried again in an hour. Raises the first error at the end.
        """
        async with self._database.writing() as transaction:
            found = await claim_removable(transaction, utc_now(), REMOVED_AT_ONCE)
        await each_apart(self.remove, found, at_once=REMOVALS_AT_ONCE)
        return len(found)

    async def remove_all_old(self) -> None:
        """Remove old files, and kept responses, until none is left. Raises as `remove_old`."""
        while await self.remove_old() == REMOVED_AT_ONCE:
            pass

    async def merge_parts(self, file_id: str, *, at_least: int = 2) -> bool:
        """Merge small objects of a file into one; return whether there may be more.

        Does nothing for fewer than `at_least` objects.
        """
        async with self._database.reading() as transaction:
            is_small = FilePartRow.file_id == file_id, FilePartRow.size < MERGED_BYTES
            first = await transaction.scalar(select(func.min(FilePartRow.start)).where(*is_small))
            if first is None:
                return False
            parts = await FileStore(transaction).parts(file_id, start=first, limit=MERGED_PARTS)
        merged, size = [], 0
        for part in parts:
            if size >= MERGED_BYTES:
                break
            merged.append(part)
            size += part.size
        if len(merged) < at_least:
            return False
        content = await self.reader.read(file_id, merged[0].start, size)
        key = await self.put(file_id, content)
        async with self._database.writing() as transaction:
            is_merged = await FileStore(transaction).merge(file_id, merged, key)
        await self._blobs.delete([part.key for part in merged] if is_merged else [key])
        return is_merged


def _visible(owner: Owner, file_id: str) -> tuple[ColumnElement[bool], ...]:
    is_visible = FileRow.is_visible.is_(True)
    return *owner.conditions(FileRow), FileRow.id == file_id, is_visible, _IS_FILE


async def claim_removable(transaction: AsyncSession, now: datetime, limit: int) -> list[str]:
    """Claim files that are expired, deleted or never completed, in turns of their tenants.

    Return their ids. They are deleted for customers, and can be claimed again after `REMOVAL`.
    """
    is_upload = and_(FileRow.is_visible.is_(False), FileRow.expires_at.is_(None))
    is_abandoned = and_(is_upload, FileRow.created_at < now - UPLOAD_LIMIT)
    rows = await lock_in_turns(
        transaction,
        FileRow,
        is_due=and_(or_(FileRow.expires_at < now, is_abandoned), ~_IS_IN_USE),
        owners=(FileRow.tenant_id,),
        order=FileRow.created_at,
        limit=limit,
    )
    for row in rows:
        row.is_visible, row.expires_at = False, now + REMOVAL
    await transaction.flush()
    return [row.id for row in rows]


def is_id(text: str) -> bool:
    """Return whether a text can be an id. PostgreSQL rejects some other characters."""
    return len(text) <= 63 and text.isascii() and text.isprintable()


def read_retention(seconds: int, *, param: str) -> timedelta:
    """Return the time after which a file expires. Raises InvalidParameterError."""
    if not MIN_RETENTION_SECONDS <= seconds <= MAX_RETENTION_SECONDS:
        bounds = f"{MIN_RETENTION_SECONDS} to {MAX_RETENTION_SECONDS}"
        raise must(param, f"be from {bounds} seconds", seconds)
    return timedelta(seconds=seconds)
