"""One bad batch or file delays no other: validation, the end of batches, and removal of files."""

import asyncio
import json
from asyncio import to_thread
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr
from redis.asyncio import Redis
from sqlalchemy import select

from gateway.accounts.keys.service import KeyService
from gateway.accounts.tenants.service import TenantService
from gateway.auth.authenticator import Authenticator
from gateway.batches import finishing, validator
from gateway.batches.files.service import REMOVAL, FileStore, Owner
from gateway.batches.finishing import BATCHES_AT_ONCE, Finisher
from gateway.batches.lines import EXPIRED, unfinished
from gateway.batches.messages import MessageBatchService, body_of
from gateway.batches.results import ResultFiles
from gateway.batches.routes import BatchService
from gateway.batches.store import BatchStore
from gateway.batches.validator import Validator
from gateway.jobs.schedule import JobServices
from gateway.platform.blobs import Blobs
from gateway.platform.changes import ChangeAnnouncer
from gateway.platform.concurrency.large_work import LargeWork
from gateway.platform.database.claims import CLAIM, TURN_SECONDS, lock_in_turns
from gateway.platform.database.tables import BatchRow, FileRow
from gateway.platform.settings import Settings
from gateway.records.batches import Batch, BatchStatus, File
from gateway.records.errors import StoreUnavailableError, TenantQueueFullError
from gateway.records.principal import Principal
from gateway.records.times import utc_now
from tests.gateway.batches.conftest import jsonl, line
from tests.gateway.conftest import eventually
from tests.support.fake_worker import FakeWorker
from tests.support.kinds import every_database
from tests.support.patience import PATIENCE_SECONDS
from tests.support.redis_server import RedisServer

MODEL = "m"
CONTENT = jsonl(line("a", model=MODEL), line("b", model=MODEL))
STEPS = {
    "validation": (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS),
    "end": (BatchStatus.CANCELLING, BatchStatus.CANCELLED),
}
"""A kind of work: the state of batches that need it, and their state afterwards."""


class Office:
    """Two tenants with files and batches, and the jobs that work on their batches."""

    def __init__(self, settings: Settings, services: JobServices) -> None:
        self.settings = settings
        self.database, self.files = services.database, services.files
        self.validator, self.finisher = services.validator, services.finisher
        self.batches = BatchService(settings, self.database)
        self.principals: dict[str, Principal] = {}
        self.jobs: dict[str, Validator | Finisher] = {
            "validation": self.validator,
            "end": self.finisher,
        }
        self._announcer = ChangeAnnouncer(services.redis)

    async def open(self) -> None:
        """Create the tenants."""
        authenticator = Authenticator.from_settings(self.settings, self.database)
        for tenant in ("many", "few"):
            await TenantService(self.database, self._announcer).create(tenant, tenant_id=tenant)
            created = await KeyService(self.database, self._announcer).create(tenant, name="key")
            self.principals[tenant] = await authenticator.principal_of_key(created.record.id)

    async def upload(self, tenant: str, content: bytes = CONTENT) -> File:
        """Store a file."""
        file = await self.files.begin_upload(Owner(tenant))
        parts = [(await self.files.put(file.id, content), len(content))]
        lines = content.count(b"\n")
        return await self.files.finish_upload(
            file, parts, name="a.jsonl", lines=lines, retention=None
        )

    async def create(self, tenant: str, file: File, kind: str = "validation") -> Batch:
        """Create a batch that needs a kind of work."""
        batch = await self.batches.create(
            self.principals[tenant],
            input_file_id=file.id,
            endpoint="/v1/completions",
            completion_window="24h",
            labels=None,
            output_seconds=None,
        )
        if kind == "end":
            await self.run_until(self.validator, batch, BatchStatus.IN_PROGRESS)
            await self.batches.cancel(Owner(tenant), batch.id)
        return batch

    async def change(self, batch: Batch, **columns: Any) -> None:
        """Change columns of a batch."""
        async with self.database.writing() as transaction:
            await BatchStore(transaction).change(batch.id, **columns)

    async def status(self, batch: Batch) -> BatchStatus:
        """Return the state of a batch."""
        return (await self.batches.get(Owner(batch.tenant_id), batch.id)).status

    async def run_until(
        self,
        job: Validator | Finisher,
        batch: Batch,
        status: BatchStatus,
        *,
        seconds: float = TURN_SECONDS,
    ) -> None:
        """Run a job until a batch has a state."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while await self.status(batch) is not status:
                await job.run(seconds=seconds)

    def break_file(self, monkeypatch: pytest.MonkeyPatch, file: File, error: Any) -> None:
        """Let each read of a file await a result of `error`."""
        get = Blobs.get

        async def broken(blobs: Blobs, key: str, start: int, size: int) -> bytes:
            if key.startswith(file.id):
                await error()
            return await get(blobs, key, start, size)

        monkeypatch.setattr(Blobs, "get", broken)


@pytest.fixture
async def office(
    database_url: str, redis: Redis, redis_server: RedisServer, tmp_path: Path
) -> AsyncIterator[Office]:
    """Two tenants, and a worker of the model."""
    await FakeWorker(redis, MODEL).announce()
    settings = Settings(
        database_url=SecretStr(database_url),
        redis_url=redis_server.url,
        file_store=str(tmp_path / "files"),
    )
    async with aclosing(JobServices(settings)) as services:
        office = Office(settings, services)
        await office.open()
        yield office


@pytest.fixture
def work() -> Iterator[LargeWork]:
    """Threads for large bodies."""
    work = LargeWork(most_waiting_bytes=10**6)
    yield work
    work.close()


async def _fails() -> None:
    raise StoreUnavailableError("The file store cannot be reached at the moment.")


async def _hangs() -> None:
    await asyncio.Event().wait()


@every_database
@pytest.mark.parametrize("kind", STEPS)
async def test_many_batches_of_another_tenant_delay_a_batch_by_a_turn(
    office: Office, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    before, after = STEPS[kind]
    file = await office.upload("many")
    many = [await office.create("many", file) for _ in range(2 * BATCHES_AT_ONCE)]
    if kind == "end":
        for batch in many:
            await office.change(batch, status=before, cancelling_at=utc_now())
    batch = await office.create("few", await office.upload("few"), kind)
    claimed: list[str] = []

    async def recorded(*arguments: Any, **options: Any) -> list[BatchRow]:
        rows = await lock_in_turns(*arguments, **options)
        claimed.extend(row.id for row in rows)
        return rows

    # How many of the others end meanwhile depends on the machine.
    monkeypatch.setattr("gateway.batches.slots.lock_in_turns", recorded)
    await office.run_until(office.jobs[kind], batch, after, seconds=0.0)
    assert claimed.index(batch.id) < BATCHES_AT_ONCE


@pytest.mark.parametrize("kind", STEPS)
@pytest.mark.parametrize("error", [_fails, _hangs])
async def test_batch_whose_file_cannot_be_read_delays_no_other(
    office: Office, monkeypatch: pytest.MonkeyPatch, kind: str, error: Callable[[], Any]
) -> None:
    before, after = STEPS[kind]
    file = await office.upload("many")
    bad = [await office.create("many", file, kind) for _ in range(5)]
    office.break_file(monkeypatch, file, error)
    # They have taken all slots but one, which is left to other tenants.
    await office.jobs[kind].run(seconds=0.2)
    good = await office.create("few", await office.upload("few"), kind)
    await office.run_until(office.jobs[kind], good, after)
    assert {await office.status(each) for each in bad} == {before}


async def test_validation_fails_with_a_reason_after_some_attempts(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = await office.upload("many")
    batch = await office.create("many", file)
    office.break_file(monkeypatch, file, _fails)
    pauses = []
    for _ in range(validator.MOST_ATTEMPTS):
        await office.change(batch, due_at=utc_now())
        await office.validator.run()
        assert await office.validator.run() == 0
        async with office.database.reading() as transaction:
            row = await transaction.get_one(BatchRow, batch.id)
            pauses.append(round((row.due_at - row.claimed_until).total_seconds()))
    assert pauses == [1, 2, 4, 8, 16, 32, 64, 128, 128]
    await office.change(batch, due_at=utc_now())
    await office.run_until(office.validator, batch, BatchStatus.FAILED)
    (error,) = (await office.batches.get(Owner("many"), batch.id)).errors or []
    assert error["code"] == "file_unreadable"
    assert "in 9 attempts" in error["message"]


async def test_batch_that_is_not_validated_before_its_deadline_expires(office: Office) -> None:
    batch = await office.create("many", await office.upload("many"))
    await office.change(batch, expires_at=batch.created_at)
    assert await office.validator.run() == 0
    await office.run_until(office.finisher, batch, BatchStatus.EXPIRED)
    (error,) = (await office.batches.get(Owner("many"), batch.id)).errors or []
    assert error["code"] == "batch_expired"


async def test_batch_whose_lines_cannot_be_read_ends_with_a_reason(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = await office.upload("many")
    batch = await office.create("many", file, "end")
    office.break_file(monkeypatch, file, _fails)
    await office.finisher.run()
    long_ago = utc_now() - finishing.GIVE_UP - timedelta(seconds=1)
    await office.change(batch, due_at=utc_now(), cancelling_at=long_ago)
    await office.run_until(office.finisher, batch, BatchStatus.CANCELLED)
    ended = await office.batches.get(Owner("many"), batch.id)
    assert (ended.completed, ended.failed, ended.total) == (0, 2, 2)
    (error,) = ended.errors or []
    assert (error["code"], error["line"]) == ("file_unreadable", 1)
    assert "2 lines have no result" in error["message"]


@pytest.mark.parametrize("kind", STEPS)
async def test_batch_of_a_dead_process_is_claimed_when_its_claim_ends(
    office: Office, kind: str
) -> None:
    _, after = STEPS[kind]
    batch, job = await office.create("many", await office.upload("many"), kind), office.jobs[kind]
    await office.change(batch, claimed_until=utc_now() + CLAIM)
    assert await job.run() == 0
    await office.change(batch, claimed_until=utc_now())
    await office.run_until(job, batch, after)


async def test_slow_work_keeps_its_claim_and_ends_with_the_process(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = await office.upload("many")
    batch = await office.create("many", file)
    office.break_file(monkeypatch, file, _hangs)
    # It is renewed after a third of this. A busy machine must not take as long as all of it.
    for module in ("gateway.batches.slots", "gateway.platform.database.claims"):
        monkeypatch.setattr(f"{module}.CLAIM", timedelta(seconds=3))

    async def claimed_until() -> Any:
        async with office.database.reading() as transaction:
            return (await transaction.get_one(BatchRow, batch.id)).claimed_until

    await office.validator.run()
    first = await claimed_until()
    await office.validator.run()

    async def is_renewed() -> bool:
        return bool(await claimed_until() > first)

    await eventually(is_renewed, what="the renewal of the claim")
    await office.validator.aclose()
    assert await claimed_until() <= utc_now()
    # A customer may cancel it meanwhile, and need not wait for the file.
    await office.change(batch, due_at=utc_now())
    await office.validator.run()
    await office.batches.cancel(Owner("many"), batch.id)
    await office.run_until(office.finisher, batch, BatchStatus.CANCELLED)
    await office.validator.run()
    assert await office.status(batch) is BatchStatus.CANCELLED


async def test_large_files_leave_slots_to_small_ones(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = [await office.upload(tenant, CONTENT + CONTENT) for tenant in ("many", "few")]
    async with office.database.writing() as transaction:
        for file in large:
            await FileStore(transaction).change(file.id, lines=10**6)
    for tenant, file in zip(("many", "few"), large, strict=True):
        for _ in range(3):
            await office.create(tenant, file)
    small = await office.create("many", await office.upload("many"))
    get = Blobs.get

    async def slow(blobs: Blobs, key: str, start: int, size: int) -> bytes:
        if key.partition("/")[0] in {file.id for file in large}:
            await _hangs()
        return await get(blobs, key, start, size)

    monkeypatch.setattr(Blobs, "get", slow)
    await office.run_until(office.validator, small, BatchStatus.IN_PROGRESS)


MESSAGES = b'{"requests":[{"custom_id":"a","params":{}},{"custom_id":"b","params":{}}]}'


async def message_batch(office: Office, work: LargeWork, **changes: Any) -> Batch:
    """Create a message batch with changed settings."""
    settings = office.settings.model_copy(update=changes)
    messages = MessageBatchService(settings, office.database, work)
    return await messages.run(office.principals["many"], MESSAGES)


@every_database
@pytest.mark.parametrize("way", ["canceled", "expired"])
async def test_message_batch_that_ends_before_its_validation_has_all_results(
    office: Office, work: LargeWork, way: str
) -> None:
    owner, messages = Owner("many"), MessageBatchService(office.settings, office.database, work)
    batch = await message_batch(office, work)
    if way == "canceled":
        await messages.cancel(owner, batch.id)
    else:
        await office.change(batch, expires_at=batch.created_at)
    after = BatchStatus.CANCELLED if way == "canceled" else BatchStatus.EXPIRED
    await office.run_until(office.finisher, batch, after)
    shown = body_of(await messages.get(owner, batch.id), office.settings)
    assert shown["request_counts"] == dict.fromkeys(shown["request_counts"], 0) | {way: 2}
    content = b"".join([piece async for piece in await messages.results(owner, batch.id)])
    found = [json.loads(each) for each in content.splitlines()]
    assert found == [{"custom_id": name, "result": {"type": way}} for name in ("a", "b")]
    later = office.settings.model_copy(update={"file_retention": timedelta(0)})
    archived = body_of(await messages.get(owner, batch.id), later)
    assert (archived["archived_at"], archived["results_url"]) == (shown["ended_at"], None)


async def test_refused_message_batch_leaves_no_file(office: Office, work: LargeWork) -> None:
    first = await message_batch(office, work, max_batches_of_tenant=1)
    with pytest.raises(TenantQueueFullError, match="at most 1 batches"):
        await message_batch(office, work, max_batches_of_tenant=1)
    async with office.database.reading() as transaction:
        assert list(await transaction.scalars(select(FileRow.id))) == [first.input_file_id]
    assert [each.name for each in (await to_thread(_folders, office))] == [first.input_file_id]


async def test_results_of_a_deleted_message_batch_are_discarded(
    office: Office, work: LargeWork
) -> None:
    batch = await message_batch(office, work)
    await office.run_until(office.validator, batch, BatchStatus.IN_PROGRESS)
    async with office.database.reading() as transaction:
        chunks = await BatchStore(transaction).open_chunks(batch.id, limit=9)
    messages = MessageBatchService(office.settings, office.database, work)
    await messages.cancel(Owner("many"), batch.id)
    await office.run_until(office.finisher, batch, BatchStatus.CANCELLED)
    await messages.delete(Owner("many"), batch.id)
    # A gateway that was believed dead ends its lines late.
    results = [unfinished(f"{batch.id}:1", "a", EXPIRED)]
    assert not await ResultFiles(office.database, office.files).add(batch, chunks, results)
    assert not [path for each in await to_thread(_folders, office) for path in each.iterdir()]


def _folders(office: Office) -> list[Path]:
    return list(Path(office.settings.file_store).iterdir())


async def test_number_of_batches_of_a_tenant_is_limited(office: Office) -> None:
    office.batches = BatchService(
        office.settings.model_copy(update={"max_batches_of_tenant": 2}), office.database
    )
    file = await office.upload("many")
    first, _ = await office.create("many", file), await office.create("many", file)
    with pytest.raises(TenantQueueFullError, match="at most 2 batches that have not ended") as full:
        await office.create("many", file)
    assert full.value.status == 429
    await office.create("few", await office.upload("few"))
    await office.change(first, status=BatchStatus.COMPLETED)
    await office.create("many", file)


# -- files ---------------------------------------------------------------------------------------


async def expired(office: Office, tenant: str, number: int = 1) -> list[File]:
    """Store files that have expired."""
    files = [await office.upload(tenant) for _ in range(number)]
    async with office.database.writing() as transaction:
        for file in files:
            past = file.created_at - timedelta(days=1)
            await FileStore(transaction).change(file.id, expires_at=past)
    return files


async def exists(office: Office, file: File) -> bool:
    """Return whether any object of a file is left."""
    return await office.files.reader.read(file.id, 0, 1) != b""


@pytest.mark.parametrize("error", [_fails, _hangs])
async def test_file_that_cannot_be_removed_delays_no_other(
    office: Office, monkeypatch: pytest.MonkeyPatch, error: Callable[[], Any]
) -> None:
    bad, good = (await expired(office, "many") + await expired(office, "few"))[:2]
    delete = Blobs.delete_folder

    async def broken(blobs: Blobs, folder: str) -> None:
        if folder == bad.id:
            await error()
        await delete(blobs, folder)

    with monkeypatch.context() as patch:
        patch.setattr(Blobs, "delete_folder", broken)
        with pytest.raises((StoreUnavailableError, TimeoutError)):
            async with asyncio.timeout(1):
                await office.files.remove_old()
    assert await exists(office, bad)
    assert not await exists(office, good)
    # It is tried again later, by any process.
    assert await office.files.remove_old() == 0
    async with office.database.writing() as transaction:
        await FileStore(transaction).change(bad.id, expires_at=utc_now() - REMOVAL)
    assert await office.files.remove_old() == 1
    assert not await exists(office, bad)


@every_database
async def test_file_is_removed_before_many_older_ones_of_another_tenant(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.batches.files.service.REMOVED_AT_ONCE", 10)
    await expired(office, "many", 10)
    (file,) = await expired(office, "few")
    await office.files.remove_old()
    assert not await exists(office, file)


async def test_one_run_removes_any_number_of_files(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.batches.files.service.REMOVED_AT_ONCE", 2)
    files = await expired(office, "many", 5)
    await office.files.remove_all_old()
    assert [await exists(office, file) for file in files] == [False] * 5


async def test_input_of_a_batch_that_ends_may_be_deleted_and_is_removed_at_its_end(
    office: Office,
) -> None:
    file = await office.upload("many")
    batch = await office.create("many", file, "end")
    await office.files.delete(Owner("many"), file.id)
    assert await office.files.remove_old() == 0
    await office.run_until(office.finisher, batch, BatchStatus.CANCELLED)
    ended = await office.batches.get(Owner("many"), batch.id)
    errors = await office.files.get(Owner("many"), ended.error_file_id or "")
    assert errors.lines == 2
    assert await office.files.remove_old() == 1
    assert not await exists(office, file)
