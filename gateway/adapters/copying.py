"""Copies of adapters: check the files at their source, and store them under their digest."""

import hashlib
import os
import tempfile
import zlib
from asyncio import to_thread
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

from redis.exceptions import RedisError

from common.object_store import S3_SCHEME
from contract import keys
from contract.adapters import (
    CONFIG_FILE,
    MAX_CONFIG_BYTES,
    WEIGHTS_FILE,
    decode_shapes,
    digest_of,
    folder_of,
)
from contract.messages import AdapterSupport
from gateway.adapters.checks import (
    LENGTH_BYTES,
    AdapterFormat,
    InvalidAdapterError,
    check_adapter,
    check_weights,
    header_length,
)
from gateway.models.catalogue import Catalogue
from gateway.platform.blobs import Blobs, MissingBlobError
from gateway.records.errors import NoWorkerError, StoreUnavailableError, shown

PIECE_BYTES: Final = 4 * 1024 * 1024
RETRY_AFTER_SECONDS: Final = 5.0

Result = TypeVar("Result")


class UnreadableSourceError(InvalidAdapterError):
    """The source of an adapter cannot be read at the moment."""


class CopiedAdapter(NamedTuple):
    """An adapter whose files are in the object store."""

    format: AdapterFormat
    sha256: str
    size: int


class AdapterCopier:
    """Copies adapters into the object store."""

    def __init__(self, blobs: Blobs, catalogue: Catalogue, *, max_bytes: int) -> None:
        self._blobs = blobs
        self._catalogue = catalogue
        self._max_bytes = max_bytes

    async def support_of(self, base_model: str) -> AdapterSupport:
        """Return which adapters the workers of a model serve. Raises NoWorkerError, RedisError."""
        served = await self._catalogue.look_up(base_model)
        if served is None or served.card.model != base_model or served.card.adapters is None:
            raise NoWorkerError(
                f"No worker announces the model {shown(base_model)} with adapters. "
                "Start one with SLUICE_ADAPTER_SLOTS.",
                retry_after_seconds=RETRY_AFTER_SECONDS,
            )
        return served.card.adapters

    async def copy(
        self, source: str, base_model: str, note: Callable[[str], Awaitable[None]]
    ) -> CopiedAdapter:
        """Check the files of a source, and copy them.

        Args:
            source: a folder or `s3://BUCKET/PREFIX`.
            base_model: its modules and workers limit the adapter.
            note: receives the digest before any file is stored under it.

        Raises InvalidAdapterError, UnreadableSourceError, NoWorkerError if the base model is not
        known, and StoreUnavailableError.
        """
        try:
            await self._catalogue.refresh()
            support = await self.support_of(base_model)
            shapes = await self._catalogue.file(keys.adapter_modules(support.modules_digest))
        except RedisError:
            shapes = None
        if shapes is None:
            raise NoWorkerError(
                f"The modules of {shown(base_model)} are not known at the moment.",
                retry_after_seconds=RETRY_AFTER_SECONDS,
            )
        modules = decode_shapes(zlib.decompress(shapes))
        async with _opened(source, max_bytes=self._max_bytes) as (config, weights):
            header, data_bytes = await to_thread(_read_header, weights)
            found = await to_thread(
                check_adapter,
                config,
                header,
                data_bytes,
                modules=modules,
                max_rank=support.max_rank,
            )
            weights_sha256 = await to_thread(_read_weights, weights, found)
            sha256 = digest_of(found.config, weights_sha256)
            folder = folder_of(sha256)
            await note(sha256)
            await self._blobs.put_file(f"{folder}/{WEIGHTS_FILE}", weights)
            await self._blobs.put(f"{folder}/{CONFIG_FILE}", found.config)
        size = LENGTH_BYTES + len(header) + data_bytes + len(found.config)
        return CopiedAdapter(found, sha256, size)

    async def remove(self, sha256: str) -> None:
        """Remove an adapter's files. Raises StoreUnavailableError."""
        await self._blobs.delete_folder(folder_of(sha256))

    def require_store(self) -> None:
        """Raise BadRequestError if the deployment has no file store."""
        self._blobs.require()


@asynccontextmanager
async def _opened(source: str, *, max_bytes: int) -> AsyncIterator[tuple[bytes, Path]]:
    """Yield the configuration, and a private copy of the weights, which does not change."""
    blobs = _SourceFolder(Path(source)) if not source.startswith(S3_SCHEME) else Blobs(source)
    with tempfile.NamedTemporaryFile() as copy:
        try:
            config_size = await blobs.size(CONFIG_FILE)
            if config_size > MAX_CONFIG_BYTES:
                raise _too_large(CONFIG_FILE, config_size, MAX_CONFIG_BYTES)
            config = await blobs.get(CONFIG_FILE, 0, config_size)
            size = await blobs.size(WEIGHTS_FILE)
            if size > max_bytes:
                raise _too_large(WEIGHTS_FILE, size, max_bytes)
            for start in range(0, size, PIECE_BYTES):
                piece = await blobs.get(WEIGHTS_FILE, start, min(PIECE_BYTES, size - start))
                await to_thread(copy.write, piece)
        except MissingBlobError:
            raise InvalidAdapterError(
                f"The source must contain {CONFIG_FILE} and {WEIGHTS_FILE}."
            ) from None
        except ValueError:
            raise InvalidAdapterError("The source is not a valid URL of S3.") from None
        except StoreUnavailableError as error:
            raise UnreadableSourceError(
                "The source cannot be read: it does not respond, or denies access."
            ) from error
        copy.flush()
        yield config, Path(copy.name)


class _SourceFolder:
    """The files of a local folder. All methods raise MissingBlobError and InvalidAdapterError."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    async def size(self, name: str) -> int:
        """Return the bytes of a file."""

        def size(path: Path) -> int:
            if not path.is_file():
                raise MissingBlobError
            return path.stat().st_size

        return await self._use(size, name)

    async def get(self, name: str, start: int, size: int) -> bytes:
        """Return a part of a file."""

        def read(path: Path) -> bytes:
            with path.open("rb") as file:
                file.seek(start)
                return file.read(size)

        return await self._use(read, name)

    async def _use(self, use: Callable[[Path], Result], name: str) -> Result:
        try:
            return await to_thread(use, self._folder / name)
        except OSError as error:
            raise InvalidAdapterError(f"{name} cannot be read: {error.strerror}.") from None


def _too_large(name: str, size: int, most: int) -> InvalidAdapterError:
    return InvalidAdapterError(f"{name} must have at most {most} bytes. Given: {size}.")


def _read_header(path: Path) -> tuple[bytes, int]:
    """Return the header of a safetensors file, and the number of bytes after it."""
    with path.open("rb") as file:
        length = header_length(file.read(LENGTH_BYTES))
        header = file.read(length)
        return header, path.stat().st_size - file.tell()


def _read_weights(path: Path, found: AdapterFormat) -> str:
    """Check the weights, and return the digest of the file."""
    with path.open("rb") as file:
        file.seek(header_length(file.read(LENGTH_BYTES)), os.SEEK_CUR)
        check_weights(file, found.tensors)
        file.seek(0)
        return hashlib.file_digest(file, "sha256").hexdigest()
