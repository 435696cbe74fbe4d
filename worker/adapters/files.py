"""A worker's copies of adapters: downloaded from the object store, verified, and bounded in size.

Workers of one machine may share the folder. An adapter's files lie in a folder that its digest
names, and appear there complete or not at all. A lock on the weights keeps them there.
"""

import fcntl
import hashlib
import logging
import os
import tempfile
from asyncio import to_thread
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from pathlib import Path
from typing import BinaryIO

from common.object_store import NO_STORE, open_store
from contract.adapters import (
    CONFIG_FILE,
    FILES,
    MAX_CONFIG_BYTES,
    WEIGHTS_FILE,
    digest_of,
    folder_of,
)
from contract.messages import AdapterRef

_log = logging.getLogger(__name__)

_DIGEST_CHARACTERS = 64
_MOST_ATTEMPTS = 10
"""Downloads of an adapter whose files other workers remove before they are locked."""


class StoreFailedError(Exception):
    """The object store did not return an adapter's files; another worker may get them."""


class WrongFilesError(Exception):
    """The files in the object store do not have the adapter's digest."""


class AdapterFiles:
    """The folder with copies of adapters.

    Args:
        place: The object store, as in the setting `file_store`.
        folder: Where the copies are stored.
        most_bytes: Size of all copies beyond which the least recently used are removed.
    """

    def __init__(self, place: str, folder: Path, *, most_bytes: int) -> None:
        self._place = place
        self._folder = folder
        self._most_bytes = most_bytes

    @asynccontextmanager
    async def using(self, adapter: AdapterRef, *, kept: Collection[str]) -> AsyncIterator[Path]:
        """Open the folder with an adapter's verified files; download them if they are missing.

        No worker removes them before the end of the block. The copies of the adapters `kept` are
        not removed to make room. Raises StoreFailedError or WrongFilesError.
        """
        folder, attempts = self._folder / adapter.digest, 0
        try:
            while (lock := _locked(folder, fcntl.LOCK_SH)) is None:
                attempts += 1
                if attempts > _MOST_ATTEMPTS:
                    raise StoreFailedError("other workers remove its files")
                await to_thread(self._get, adapter, folder, {*kept, adapter.digest})
            # The time of the last use, in a form that other processes see, too.
            os.utime(folder)
        except OSError as error:
            raise StoreFailedError(f"{type(error).__name__}: {error.strerror}") from error
        with lock:
            yield folder

    def _get(self, adapter: AdapterRef, folder: Path, kept: set[str]) -> None:
        if not folder.is_dir():
            if adapter.size > self._most_bytes:
                raise WrongFilesError(
                    f"it has {adapter.size} bytes, more than SLUICE_ADAPTER_FOLDER_BYTES "
                    f"({self._most_bytes})"
                )
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._make_room(self._most_bytes - adapter.size, kept)
            self._download(adapter, folder)

    def _download(self, adapter: AdapterRef, folder: Path) -> None:
        if self._place == NO_STORE:
            raise StoreFailedError("the worker has no file store (SLUICE_FILE_STORE)")
        with tempfile.TemporaryDirectory(dir=self._folder, prefix="part-") as name:
            part = Path(name) / adapter.digest
            part.mkdir()
            left = adapter.size
            for file in FILES:
                most = min(left, MAX_CONFIG_BYTES) if file == CONFIG_FILE else left
                left -= self._fetch(f"{folder_of(adapter.digest)}/{file}", part / file, most)
            with (part / WEIGHTS_FILE).open("rb") as weights:
                sha256 = hashlib.file_digest(weights, "sha256").hexdigest()
            if digest_of((part / CONFIG_FILE).read_bytes(), sha256) != adapter.digest:
                raise WrongFilesError("its files in the store do not have its digest")
            try:
                part.rename(folder)
            except OSError:
                if not folder.is_dir():  # Another worker was faster.
                    raise

    def _fetch(self, key: str, path: Path, most_bytes: int) -> int:
        """Download an object of at most `most_bytes`; return its size."""
        import obstore
        from obstore.exceptions import BaseError

        size = 0
        try:
            with path.open("wb") as file:
                for piece in obstore.get(open_store(self._place), key).stream():
                    size += len(piece)
                    if size > most_bytes:
                        raise WrongFilesError("its files in the store are larger than registered")
                    file.write(piece)
        except FileNotFoundError as error:
            raise StoreFailedError(f"{key} is missing in the store") from error
        except BaseError as error:
            raise StoreFailedError(str(error).partition("\n")[0]) from error
        return size

    def _make_room(self, most_bytes: int, kept: set[str]) -> None:
        """Remove the copies that were not used for longest, until the rest has `most_bytes`."""
        copies = []
        for entry in self._folder.iterdir():
            if len(entry.name) == _DIGEST_CHARACTERS:
                try:
                    size = sum((entry / file).stat().st_size for file in FILES)
                    copies.append((entry.stat().st_mtime, size, entry))
                except OSError:
                    continue  # Another worker removes it.
        total = sum(size for _, size, _ in copies)
        for _, size, entry in sorted(copies):
            if total <= most_bytes:
                return
            if entry.name not in kept and (lock := _locked(entry, fcntl.LOCK_EX)) is not None:
                with lock, tempfile.TemporaryDirectory(dir=self._folder, prefix="part-") as part:
                    entry.rename(Path(part) / entry.name)
                total -= size


def _locked(folder: Path, operation: int) -> BinaryIO | None:
    """Lock a copy. Return None if another worker removes it, or uses it and `operation` forbids."""
    try:
        lock = (folder / WEIGHTS_FILE).open("r+b")
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(lock, operation | fcntl.LOCK_NB)
        if os.fstat(lock.fileno()).st_nlink:
            return lock
    except BlockingIOError:
        pass
    lock.close()
    return None
