"""Object store of files: a local folder, or a bucket of an S3-compatible service.

An object is one part of a file. It is written once, whole, and never changed.

Threads call the blocking functions of obstore: a process that exits just after one of its
coroutines has ended may abort.
"""

import shutil
from asyncio import to_thread
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

from gateway.errors import BadRequestError, StoreUnavailableError

if TYPE_CHECKING:
    from obstore.store import LocalStore, S3Store

S3_SCHEME: Final = "s3://"
NO_STORE: Final = "none"
TIMEOUT: Final = timedelta(seconds=30)
"""Time limit of one request to S3."""
RETRIES: Final = 3


class MissingBlobError(Exception):
    """An object does not exist: its file was deleted, or its part was merged into a larger one."""


class Blobs:
    """Objects by key. All methods raise StoreUnavailableError."""

    def __init__(self, place: str) -> None:
        """Use the folder or the `s3://BUCKET/PREFIX` of the setting `file_store`.

        Nothing is opened before the first use. The credentials of S3 are the standard variables
        `AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY`, `AWS_REGION` and `AWS_ENDPOINT_URL`, or those
        of the machine.
        """
        self._place = place

    async def put(self, key: str, content: bytes) -> None:
        """Write an object. It exists afterwards, or not at all."""
        import obstore

        with self._converting_errors():
            await to_thread(obstore.put, self._store(), key, content, use_multipart=False)

    async def get(self, key: str, start: int, size: int) -> bytes:
        """Return `size` bytes from `start` on. Raises MissingBlobError."""
        import obstore

        with self._converting_errors():
            content = await to_thread(
                obstore.get_range, self._store(), key, start=start, length=size
            )
            return bytes(content)

    async def delete(self, keys: list[str]) -> None:
        """Delete objects; those that do not exist are ignored."""
        import obstore

        for key in keys:
            with suppress(MissingBlobError), self._converting_errors():
                await to_thread(obstore.delete, self._store(), key)

    async def delete_folder(self, folder: str) -> None:
        """Delete all objects whose keys begin with `folder/`, including unfinished ones."""
        import obstore

        if (local := _folder_of(self._place)) is not None:
            # A process that was killed may have left a file that is no object yet.
            await to_thread(shutil.rmtree, local / folder, ignore_errors=True)
            return
        with self._converting_errors():
            for page in await to_thread(list, obstore.list(self._store(), f"{folder}/")):
                keys = [meta["path"] for meta in page]
                await to_thread(obstore.delete, self._store(), keys)

    def require(self) -> None:
        """Raise BadRequestError if the deployment has no file store."""
        if self._place == NO_STORE:
            raise BadRequestError("This deployment has no file store (SLUICE_FILE_STORE).")

    def _store(self) -> "LocalStore | S3Store":
        self.require()
        return _opened(self._place)

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


@cache
def _opened(place: str) -> "LocalStore | S3Store":
    """Return the store of a process, whose connections all users share."""
    from obstore.store import LocalStore, S3Store

    if (folder := _folder_of(place)) is not None:
        return LocalStore(folder, automatic_cleanup=True, mkdir=True)
    return S3Store.from_url(
        place,
        # The operator's endpoint decides whether to use TLS.
        client_options={"timeout": TIMEOUT, "connect_timeout": TIMEOUT, "allow_http": True},
        retry_config={"max_retries": RETRIES, "retry_timeout": TIMEOUT},
    )


def _folder_of(place: str) -> Path | None:
    return None if place.startswith(S3_SCHEME) else Path(place).absolute()
