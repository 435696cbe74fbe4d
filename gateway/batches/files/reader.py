"""File reader: read a part of a file, or its lines, from its objects."""

from collections.abc import AsyncIterator

from gateway.batches.files.store import FilePart, FileStore
from gateway.platform.blobs import Blobs, MissingBlobError
from gateway.platform.database.engine import Database
from gateway.records.errors import StoreUnavailableError

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
