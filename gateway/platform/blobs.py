"""Object store of files: a local folder, or a bucket of an S3-compatible service.

An object is one part of a file, a file of an adapter, or a part of a kept response. It is written
once, whole, and never changed.
"""

import shutil
from asyncio import to_thread
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from common.object_store import NO_STORE, folder_of, open_store
from gateway.records.errors import BadRequestError, StoreUnavailableError

if TYPE_CHECKING:
    from obstore.store import LocalStore, S3Store


class MissingBlobError(Exception):
    """An object does not exist: its file was deleted, or its part was merged into a larger one."""


def log_of(place: str, tenant_id: str) -> "Blobs":
    """Return the store of a tenant's prompt log, whose objects are in the folder of the tenant.

    `place` is the setting `prompt_log_store`.
    """
    return Blobs(place.replace("{tenant}", tenant_id))


class Blobs:
    """Objects by key. All methods raise StoreUnavailableError."""

    def __init__(self, place: str) -> None:
        """Use the folder or the `s3://BUCKET/PREFIX` of the setting `file_store`.

        Nothing is opened before the first use.
        """
        self._place = place

    async def put(self, key: str, content: bytes) -> None:
        """Write an object. It exists afterwards, or not at all."""
        import obstore

        with self._converting_errors():
            await to_thread(obstore.put, self._store(), key, content, use_multipart=False)

    async def put_file(self, key: str, path: Path) -> None:
        """Write an object with the content of a local file, without reading all of it at once."""
        import obstore

        with self._converting_errors():
            await to_thread(obstore.put, self._store(), key, path)

    async def get(self, key: str, start: int, size: int) -> bytes:
        """Return `size` bytes from `start` on. Raises MissingBlobError."""
        import obstore

        with self._converting_errors():
            content = await to_thread(
                obstore.get_range, self._store(), key, start=start, length=size
            )
        if len(content) < size:
            raise MissingBlobError  # It was damaged: objects are written whole.
        return bytes(content)

    async def read(self, key: str) -> bytes:
        """Return a whole object. Raises MissingBlobError."""
        import obstore

        with self._converting_errors():
            return await to_thread(lambda: bytes(obstore.get(self._store(), key).bytes()))

    async def size(self, key: str) -> int:
        """Return the bytes of an object. Raises MissingBlobError."""
        import obstore

        with self._converting_errors():
            return (await to_thread(obstore.head, self._store(), key))["size"]

    async def delete(self, keys: list[str]) -> None:
        """Delete objects; those that do not exist are ignored."""
        import obstore

        for key in keys:
            with suppress(MissingBlobError), self._converting_errors():
                await to_thread(obstore.delete, self._store(), key)

    async def delete_folder(self, folder: str) -> None:
        """Delete all objects whose keys begin with `folder/`, including unfinished ones."""
        import obstore

        if (local := folder_of(self._place)) is not None:
            # A process that was killed may have left a file that is no object yet.
            await to_thread(shutil.rmtree, local / folder, ignore_errors=True)
            return
        with self._converting_errors():
            for page in await to_thread(list, obstore.list(self._store(), f"{folder}/")):
                keys = [meta["path"] for meta in page]
                await to_thread(obstore.delete, self._store(), keys)

    async def folders(self, folder: str) -> list[str]:
        """Return the names of the folders in a folder."""
        import obstore

        with self._converting_errors():
            found = await to_thread(obstore.list_with_delimiter, self._store(), f"{folder}/")
        return [each.rstrip("/").rpartition("/")[2] for each in found["common_prefixes"]]

    def require(self) -> None:
        """Raise BadRequestError if the deployment has no file store."""
        if self._place == NO_STORE:
            raise BadRequestError("This deployment has no file store (SLUICE_FILE_STORE).")

    def _store(self) -> "LocalStore | S3Store":
        self.require()
        return open_store(self._place)

    @contextmanager
    def _converting_errors(self) -> Iterator[None]:
        from obstore.exceptions import BaseError

        try:
            yield
        except FileNotFoundError:
            raise MissingBlobError from None
        except (BaseError, OSError) as error:
            raise StoreUnavailableError(
                "The file store cannot be reached at the moment.",
                detail=f"The file store {self._place}: {str(error).partition(chr(10))[0]}.",
                retry_after_seconds=1.0,
            ) from error
