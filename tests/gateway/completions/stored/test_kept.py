"""The store of kept responses: its rows and objects, whatever fails, and the files beside it."""

import asyncio
import shutil
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from sqlalchemy import update

from common.tasks import TaskSet
from gateway.accounts.tenants.service import TenantService
from gateway.batches.files.service import FileService, FileStore
from gateway.completions.stored import kept as keeping
from gateway.completions.stored import object_writer
from gateway.completions.stored.kept import Kept, KeptResponses
from gateway.dialects.profile import PROFILES, Dialect
from gateway.dialects.responses.request import kept_options, read_response
from gateway.platform.database.engine import Database
from gateway.platform.database.tables import FileRow
from gateway.platform.settings import Settings
from gateway.records.errors import PayloadTooLargeError
from gateway.records.times import utc_now
from tests.support.kinds import every_database

ID = "resp_" + "a" * 26
BODY = {"model": "m", "input": "Hello", "instructions": "Be brief."}
OUTPUT = {"id": ID, "output": []}


class Store:
    """Kept responses, and the files of the same database, in a folder."""

    def __init__(self, database: Database, folder: Path, *, most_bytes: int = 10_000) -> None:
        settings = Settings(file_store=str(folder), max_file_bytes_of_tenant=most_bytes)
        self.database, self.folder = database, folder / ID
        self.tasks = TaskSet()
        settlements: Any = SimpleNamespace(tasks=self.tasks)
        self.kept = KeptResponses(settings, database, settlements)
        self.files = FileService(settings, database)
        request = read_response(BODY, PROFILES[Dialect.OPENAI], max_prompts=1)
        options = kept_options(request)
        assert options is not None
        self.completion: Any = SimpleNamespace(id=ID, model="m", request=request)
        self.echo = options.echo

    async def begin(self) -> None:
        """Keep the input of the response."""
        record: Any = SimpleNamespace(request_id=ID, tenant_id="acme", project_id=None)

        async def beside(work: Callable[[], Any], *, size: int = 0) -> Any:
            del size
            return work()

        self.kept.begin(record, self.completion, BODY, beside)
        await self.tasks.finish(10)

    async def finish(self) -> None:
        """Keep the response itself."""
        whole = msgspec.json.encode(OUTPUT)[:-1] + b"," + self.echo[1:]
        writing = self.kept.finish(self.completion, whole)
        assert writing is not None
        await writing

    async def find(self, **bounds: int) -> Kept | None:
        """Return the response as a caller of its tenant finds it."""
        caller: Any = SimpleNamespace(
            tenant_id="acme", project_id=None, allows_model=lambda name: name == "m"
        )
        return (await self.kept.find(caller, {ID: True}, **bounds)).get(ID)

    async def used(self) -> int:
        """Return the bytes that count for the tenant."""
        async with self.database.reading() as transaction:
            return (await FileStore(transaction).use_of("acme")).size

    async def let_expire(self) -> None:
        """Let the row expire."""
        async with self.database.writing() as transaction:
            past = utc_now() - timedelta(seconds=1)
            await transaction.execute(update(FileRow).values(expires_at=past))


@pytest.fixture
async def store(database: Database, tenants: TenantService, tmp_path: Path) -> Store:
    """An empty store, with the tenant `acme`."""
    await tenants.create("Acme", tenant_id="acme")
    return Store(database, tmp_path)


@every_database
async def test_response_counts_as_a_file_until_it_expires(store: Store) -> None:
    await store.begin()
    assert await store.find() is None
    await store.finish()
    found = await store.find()
    assert found is not None
    assert msgspec.json.decode(found.response) == OUTPUT
    given = msgspec.json.decode(found.input)
    assert given["echo"]["instructions"] == "Be brief."
    assert [each["content"][0]["text"] for each in given["items"]] == ["Hello"]
    assert (
        await store.used()
        == sum(map(len, found))
        == sum(each.stat().st_size for each in store.folder.iterdir())
    )
    await store.let_expire()
    assert await store.find() is None
    assert await store.files.remove_old() == 1
    assert not store.folder.exists()
    assert await store.used() == 0


async def test_reading_stops_beyond_its_bound(store: Store) -> None:
    await store.begin()
    await store.finish()
    size = await store.used()
    assert await store.find(most_bytes=size) is not None
    with pytest.raises(PayloadTooLargeError, match=f"at most {size - 1} bytes. Given: at least"):
        await store.find(most_bytes=size - 1)


async def test_input_of_a_response_that_never_ends_is_removed(store: Store) -> None:
    await store.begin()
    assert store.folder.exists()
    assert await store.files.remove_old() == 0
    await store.let_expire()
    assert await store.files.remove_old() == 1
    assert not store.folder.exists()
    # It ends later than anyone expects, and leaves no object without a row.
    await store.finish()
    assert not store.folder.exists()


async def test_account_without_room_keeps_nothing_and_runs(
    database: Database, store: Store, tmp_path: Path
) -> None:
    del store
    full = Store(database, tmp_path, most_bytes=20)
    await full.begin()
    await full.finish()
    assert await full.find() is None
    assert not full.folder.exists()
    assert await full.used() == 0


async def test_response_that_cannot_be_written_does_not_count(store: Store) -> None:
    await store.begin()
    shutil.rmtree(store.folder)
    store.folder.touch()
    await store.finish()
    assert await store.find() is None
    assert await store.used() == 0
    store.folder.unlink()
    assert await store.files.remove_old() == 1


async def test_input_that_cannot_be_written_does_not_count(store: Store) -> None:
    store.folder.touch()
    await store.begin()
    assert await store.used() == 0
    store.folder.unlink()
    await store.finish()
    assert await store.find() is None
    assert not store.folder.exists()


async def test_deleted_response_is_not_kept_when_it_ends(store: Store) -> None:
    await store.begin()
    await store.kept.remove(ID)
    assert not store.folder.exists()
    await store.finish()
    assert await store.find() is None
    assert not store.folder.exists()
    assert await store.used() == 0


async def test_response_that_is_written_again_counts_once(store: Store) -> None:
    await store.begin()
    await store.finish()
    size = await store.used()
    # The gateway that takes a response over repeats what the former one has done.
    await store.finish()
    assert await store.used() == size
    assert await store.find() is not None


async def test_slow_store_delays_no_response_and_holds_few_bytes(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    await store.begin()
    monkeypatch.setattr(keeping, "KEEP_SECONDS", 0.01)
    turns = [store.kept._writer._turns.acquire() for _ in range(object_writer.WRITES_AT_ONCE)]
    await asyncio.gather(*turns)
    await store.finish()
    assert await store.find() is None
    monkeypatch.setattr(object_writer, "MOST_UNWRITTEN_BYTES", len(msgspec.json.encode(OUTPUT)))
    await store.finish()
    for _ in turns:
        store.kept._writer._turns.release()
    await store.tasks.finish(10)
    # The first one was written when the store could, the second one was not.
    assert await store.find() is not None
    assert store.kept._writer._unwritten_bytes == 0
