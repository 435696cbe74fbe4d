"""Queries on the tables `files` and `file_parts`."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, delete, func, insert, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from gateway.platform.database.tables import BatchRow, FilePartRow, FileRow
from gateway.records.batches import File


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
