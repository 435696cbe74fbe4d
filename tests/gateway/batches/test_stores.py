"""File stores: the same files in a folder and in S3."""

import zlib
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest

from contract.adapters import FILES, WEIGHTS_FILE, encode_shapes
from contract.messages import AdapterRef, AdapterSupport
from gateway.accounts.tenants.service import TenantService
from gateway.adapters.checks import InvalidAdapterError
from gateway.adapters.copying import AdapterCopier
from gateway.batches.files.service import Bound, FileService, FileStore, Owner
from gateway.platform.blobs import Blobs, MissingBlobError
from gateway.platform.changes import ChangeAnnouncer
from gateway.platform.database.engine import Database
from gateway.platform.settings import Settings
from gateway.records.batches import File
from gateway.records.errors import BadRequestError, ConflictError, StoreUnavailableError
from tests.gateway.batches.s3_server import BUCKET
from tests.support.adapters import FEATURES, Q_PROJ, RANK, write_adapter
from tests.support.kinds import every_database
from worker.adapters.files import AdapterFiles, StoreFailedError

ACME = Owner("acme")


@pytest.fixture(params=["folder", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A file store."""
    if request.param == "folder":
        return str(tmp_path / "files")
    for name, value in request.getfixturevalue("s3").items():
        monkeypatch.setenv(name, value)
    return f"s3://{BUCKET}/{tmp_path.name}"


@pytest.fixture
async def files(place: str, database: Database, redis: object) -> FileService:
    """The files of a database with the tenant `acme`."""
    del redis
    settings = Settings(
        file_store=place,
        max_file_bytes=1000,
        max_file_lines=10,
        max_file_bytes_of_tenant=100,
        max_file_lines_of_tenant=10,
        file_retention=timedelta(days=1),
    )
    return FileService(settings, database)


@pytest.fixture(autouse=True)
async def _acme(database: Database, redis: object) -> None:
    await TenantService(database, ChangeAnnouncer(redis)).create("Acme", tenant_id="acme")  # type: ignore[arg-type]


async def uploaded(files: FileService, *parts: bytes) -> File:
    """Upload a file in some parts."""
    file = await files.begin_upload(ACME)
    stored = [(await files.put(file.id, part), len(part)) for part in parts]
    lines = b"".join(parts).count(b"\n")
    return await files.finish_upload(file, stored, name="a.jsonl", lines=lines, retention=None)


async def test_objects_exist_until_they_are_deleted(place: str) -> None:
    blobs = Blobs(place)
    for key in ("f1/a", "f1/b", "f10/a"):
        await blobs.put(key, f"content of {key}".encode())
    assert await blobs.get("f1/a", 8, 7) == b"of f1/a"
    await blobs.delete(["f1/a", "f1/missing"])
    with pytest.raises(MissingBlobError):
        await blobs.get("f1/a", 0, 1)
    await blobs.delete_folder("f1")
    with pytest.raises(MissingBlobError):
        await blobs.get("f1/b", 0, 1)
    assert await blobs.get("f10/a", 0, 7) == b"content"


@every_database
async def test_file_is_read_across_its_parts_while_they_are_merged(files: FileService) -> None:
    content = b"one\ntwo\nthree\nfour"
    file = await uploaded(files, b"one\ntw", b"o\n", b"three\nfo", b"ur")
    assert (file.size, file.lines) == (len(content), 3)
    pieces = files.reader.pieces(file.id, 2, 15)
    first = await anext(pieces)
    assert await files.merge_parts(file.id)
    assert first + b"".join([piece async for piece in pieces]) == content[2:15]
    assert not await files.merge_parts(file.id)
    lines = [each async for some in files.reader.lines(file.id, file.size) for each in some]
    assert lines == [b"one", b"two", b"three", b"four"]
    assert await files.reader.read(file.id, 4, 99) == content[4:]
    await files.delete(ACME, file.id)
    assert await files.reader.read(file.id, 0, 1) == b""


async def test_file_beyond_the_limits_of_the_tenant_is_refused(files: FileService) -> None:
    await uploaded(files, b"x" * 60)
    assert await files.require_room("acme") == (
        Bound(40, "The files of an account must have at most 100 bytes, of which 40 are left."),
        Bound(10, "The file must have at most 10 lines."),
    )
    with pytest.raises(ConflictError, match="at most 100 bytes and 10 lines"):
        await uploaded(files, b"x" * 50)


@every_database
async def test_expired_files_and_abandoned_uploads_are_removed(
    files: FileService, database: Database
) -> None:
    file, kept = await uploaded(files, b"{}\n"), await uploaded(files, b"{}\n")
    upload = await files.begin_upload(ACME)
    await files.put(upload.id, b"half")
    async with database.writing() as transaction:
        past = file.created_at - timedelta(days=2)
        await FileStore(transaction).change(file.id, expires_at=past)
        await FileStore(transaction).change(upload.id, created_at=past)
    assert await files.remove_old() == 2
    assert await files.remove_old() == 0
    assert await files.reader.read(kept.id, 0, 3) == b"{}\n"
    assert (await files.get(ACME, kept.id)).size == 3


async def test_store_that_cannot_be_reached_is_named_without_credentials(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "the-id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "the-secret")
    with pytest.raises(StoreUnavailableError) as raised:
        await Blobs("s3://bucket/unreachable").get("a", 0, 1)
    assert "s3://bucket/unreachable" in raised.value.detail
    assert "the-secret" not in raised.value.detail


async def test_deployment_without_a_store_refuses_uploads() -> None:
    with pytest.raises(BadRequestError, match="SLUICE_FILE_STORE"):
        Blobs("none").require()


async def test_adapter_passes_from_its_source_through_the_store_to_a_worker(
    place: str, tmp_path: Path
) -> None:
    source, local = f"{place}-source", Path(write_adapter(tmp_path / "adapter"))
    for name in FILES:
        await Blobs(source).put(name, (local / name).read_bytes())
    card = SimpleNamespace(model="base", adapters=AdapterSupport(RANK, "digest"))
    shapes = zlib.compress(encode_shapes({Q_PROJ: (FEATURES, FEATURES)}))
    catalogue: Any = SimpleNamespace(
        refresh=AsyncMock(),
        look_up=AsyncMock(return_value=SimpleNamespace(card=card)),
        file=AsyncMock(return_value=shapes),
    )
    copier = AdapterCopier(Blobs(place), catalogue, max_bytes=10**6)
    copied = await copier.copy(source, "base", AsyncMock())
    adapter = AdapterRef(copied.sha256, RANK, copied.size)
    async with AdapterFiles(place, tmp_path / "one", most_bytes=10**6).using(
        adapter, kept=[]
    ) as folder:
        assert (folder / WEIGHTS_FILE).read_bytes() == (local / WEIGHTS_FILE).read_bytes()
    await copier.remove(copied.sha256)
    files = AdapterFiles(place, tmp_path / "two", most_bytes=10**6)
    with pytest.raises(StoreFailedError, match="is missing in the store"):
        async with files.using(adapter, kept=[]):
            pass
    await Blobs(source).delete([WEIGHTS_FILE])
    with pytest.raises(InvalidAdapterError, match="The source must contain"):
        await copier.copy(source, "base", AsyncMock())
