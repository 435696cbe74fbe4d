"""Validation and removal of adapters: bad, slow and lost ones, and files that others need."""

import asyncio
import zlib
from collections import Counter
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis
from sqlalchemy import select

from contract import keys
from contract.adapters import encode_shapes, folder_of
from contract.messages import AdapterSupport
from gateway.accounts.tenants.service import TenantService
from gateway.adapters import service as service_module
from gateway.adapters.copying import AdapterCopier
from gateway.adapters.service import AT_ONCE, AT_ONCE_OF_TENANT, AdapterService
from gateway.models.catalogue import Catalogue
from gateway.platform.blobs import Blobs
from gateway.platform.changes import ChangeAnnouncer
from gateway.platform.database import claims as claims_module
from gateway.platform.database.claims import CLAIM, Claim, LostClaimError
from gateway.platform.database.engine import Database
from gateway.platform.database.tables import AdapterRow
from gateway.records.adapters import Adapter, AdapterState
from gateway.records.errors import StoreUnavailableError
from gateway.records.times import utc_now
from tests.support.adapters import FEATURES, Q_PROJ, write_adapter
from tests.support.fake_worker import FakeWorker
from tests.support.kinds import every_database
from tests.support.patience import PATIENCE_SECONDS

UNREACHABLE = "s3://127.0.0.1:1/x"
DAY = timedelta(days=1)


@pytest.fixture
async def service(
    database: Database, redis: Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[AdapterService]:
    """Adapters of two tenants, with a folder as their store and an S3 that cannot be reached."""
    for name in ("REGION", "ACCESS_KEY_ID", "SECRET_ACCESS_KEY"):
        monkeypatch.setenv(f"AWS_{name}", "x")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    for tenant_id in ("acme", "other"):
        await TenantService(database, ChangeAnnouncer(redis)).create("x", tenant_id=tenant_id)
    await FakeWorker(redis, "base").announce(adapters=AdapterSupport(16, "shapes"))
    shapes = zlib.compress(encode_shapes({Q_PROJ: (FEATURES, FEATURES)}))
    await redis.set(keys.adapter_modules("shapes"), shapes)
    service = _service(database, redis, tmp_path)
    yield service
    await service.aclose()


def _service(database: Database, redis: Redis, folder: Path) -> AdapterService:
    catalogue = Catalogue(redis)
    copier = AdapterCopier(Blobs(str(folder / "store")), catalogue, max_bytes=10**6)
    return AdapterService(database, ChangeAnnouncer(redis), catalogue, copier)


async def _register(service: AdapterService, tenant: str, name: str, source: str) -> Adapter:
    return await service.register(tenant, name, base_model="base", source=source)


async def _row(database: Database, adapter: Adapter) -> AdapterRow:
    async with database.reading() as transaction:
        return await transaction.get_one(AdapterRow, adapter.id)


async def _change(database: Database, adapter: Adapter, **columns: Any) -> None:
    async with database.writing() as transaction:
        row = await transaction.get_one(AdapterRow, adapter.id)
        for name, value in columns.items():
            setattr(row, name, value)


async def _age(database: Database, by: timedelta) -> None:
    """Let all adapters be older, and all pauses and claims end."""
    async with database.writing() as transaction:
        for row in (await transaction.scalars(select(AdapterRow))).all():
            row.created_at -= by
            row.claimed_until -= by
            if row.deleted_at is not None:
                row.deleted_at -= by


@every_database
async def test_unreachable_source_delays_nobody_and_fails_with_a_reason(
    service: AdapterService, database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # However slow the attempts are, each adapter has one in a run.
    monkeypatch.setattr(service_module, "RUN_SECONDS", PATIENCE_SECONDS)
    for name in ("SOURCE_PATIENCE", "FIRST_PAUSE", "LONGEST_PAUSE"):
        monkeypatch.setattr(service_module, name, DAY)
    bad = [await _register(service, "acme", f"bad-{at}", UNREACHABLE) for at in range(9)]
    good = await _register(service, "other", "good", write_adapter(tmp_path / "good"))
    assert await service.validate_new() == 1
    assert (await _row(database, good)).state is AdapterState.READY
    for adapter in bad:
        row = await _row(database, adapter)
        assert (row.state, row.reason[:26]) == ("validating", "The source cannot be read:")
        assert row.claimed_until > utc_now() + CLAIM, "it was given back"
    await _age(database, 2 * DAY)
    assert await service.validate_new() == 0
    for adapter in bad:
        row = await _row(database, adapter)
        assert row.state is AdapterState.FAILED
        assert "127.0.0.1" not in row.reason


async def test_adapter_with_a_weight_that_is_no_number_fails(
    service: AdapterService, database: Database, tmp_path: Path
) -> None:
    source = write_adapter(tmp_path / "nan", last_weight=b"\xc0\x7f")
    adapter = await _register(service, "acme", "nan", source)
    await service.validate_new()
    row = await _row(database, adapter)
    name = f"base_model.model.{Q_PROJ}.lora_B.weight"
    reason = f'The tensor "{name}" has a weight that is NaN or infinite.'
    assert (row.state, row.reason) == (AdapterState.FAILED, reason)
    assert not (tmp_path / "store").exists(), "nothing was copied"


async def test_slow_sources_of_four_tenants_leave_a_slot_to_another(
    redis: Redis,
    service: AdapterService,
    database: Database,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(service_module, "RUN_SECONDS", 0.1)
    may_end = asyncio.Event()
    copy = AdapterCopier.copy

    async def slow(copier: AdapterCopier, source: str, *rest: Any) -> Any:
        if source == UNREACHABLE:
            await may_end.wait()
        return await copy(copier, source, *rest)

    monkeypatch.setattr(AdapterCopier, "copy", slow)
    slow_tenants = ["acme", "b", "c", "d"]
    for tenant in slow_tenants:
        if tenant != "acme":
            await TenantService(database, ChangeAnnouncer(redis)).create("x", tenant_id=tenant)
        for at in range(3):
            await _register(service, tenant, f"slow-{at}", UNREACHABLE)
    for _ in slow_tenants:
        await service.validate_new()
    good = await _register(service, "other", "good", write_adapter(tmp_path / "good"))
    async with asyncio.timeout(PATIENCE_SECONDS):
        while (await _row(database, good)).state is not AdapterState.READY:
            await service.validate_new()
    async with database.reading() as transaction:
        claimed = select(AdapterRow).where(
            AdapterRow.state == AdapterState.VALIDATING, AdapterRow.claimed_until > utc_now()
        )
        rows = (await transaction.scalars(claimed)).all()
    assert len(rows) == AT_ONCE - 1
    assert max(Counter(each.tenant_id for each in rows).values()) == AT_ONCE_OF_TENANT


async def test_slow_source_gives_way_to_a_tenant_without_a_slot(
    redis: Redis,
    service: AdapterService,
    database: Database,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, seconds in (("RUN_SECONDS", 0.1), ("LEAST_SECONDS", 0.1), ("LOOK_SECONDS", 0.01)):
        monkeypatch.setattr(service_module, name, seconds)
    copy, ended = AdapterCopier.copy, list[str]()

    async def slow(copier: AdapterCopier, source: str, *rest: Any) -> Any:
        try:
            if source.startswith(UNREACHABLE):
                await asyncio.Event().wait()
        finally:
            ended.append(source)
        return await copy(copier, source, *rest)

    monkeypatch.setattr(AdapterCopier, "copy", slow)
    for at in range(AT_ONCE):
        tenant = f"slow-{at}"
        await TenantService(database, ChangeAnnouncer(redis)).create("x", tenant_id=tenant)
        await _register(service, tenant, "slow", f"{UNREACHABLE}/{at}")
    await service.validate_new()
    await asyncio.sleep(0.3)
    await service.validate_new()
    assert not ended, "nobody else needs a slot"
    good = await _register(service, "other", "good", write_adapter(tmp_path / "good"))
    async with asyncio.timeout(PATIENCE_SECONDS):
        while (await _row(database, good)).state is not AdapterState.READY:
            await service.validate_new()
    assert [source.startswith(UNREACHABLE) for source in ended] == [True, False]
    async with database.reading() as transaction:
        tried = select(AdapterRow).where(AdapterRow.reason.startswith("The source is slow."))
        [row] = (await transaction.scalars(tried)).all()
    assert row.state is AdapterState.VALIDATING
    assert row.claimed_until > utc_now()


async def test_validation_that_takes_too_long_ends(
    service: AdapterService, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def hang(*_: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(AdapterCopier, "copy", hang)
    monkeypatch.setattr(service_module, "SECONDS", 0.1)
    adapter = await _register(service, "acme", "slow", UNREACHABLE)
    await _age(database, timedelta(minutes=2))
    await service.validate_new()
    row = await _row(database, adapter)
    assert (row.state, row.reason) == ("failed", "The files were not copied within 0 seconds.")


async def test_bug_in_one_validation_delays_no_other(
    service: AdapterService, database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = AdapterCopier.copy

    async def fail(copier: AdapterCopier, source: str, *rest: Any) -> Any:
        return 1 / 0 if source == UNREACHABLE else await copy(copier, source, *rest)

    monkeypatch.setattr(AdapterCopier, "copy", fail)
    bad = await _register(service, "acme", "bad", UNREACHABLE)
    await _register(service, "acme", "good", write_adapter(tmp_path / "good"))
    assert await service.validate_new() == 1
    await _age(database, timedelta(minutes=2))
    await service.validate_new()
    assert (await _row(database, bad)).reason == "The validation failed by an internal error."


async def test_outage_of_redis_fails_no_adapter(
    service: AdapterService, database: Database, redis: Redis, tmp_path: Path
) -> None:
    adapter = await _register(service, "acme", "poet", write_adapter(tmp_path / "poet"))
    await _age(database, timedelta(minutes=50))
    async with Redis.from_url("redis://127.0.0.1:1") as away:
        assert await _service(database, away, tmp_path).validate_new() == 0
    row = await _row(database, adapter)
    assert (row.state, row.reason[:14]) == ("validating", "The modules of")
    await _age(database, timedelta(minutes=5))
    assert await service.validate_new() == 1
    assert (await _row(database, adapter)).reason == ""


@pytest.mark.parametrize("source", ["s3://a b/c", "/proc/1/fd"])
async def test_impossible_source_fails_at_once(
    service: AdapterService, database: Database, source: str
) -> None:
    adapter = await _register(service, "acme", "bad", source)
    await service.validate_new()
    assert (await _row(database, adapter)).state is AdapterState.FAILED


async def test_adapter_of_a_dead_process_is_validated_again(
    service: AdapterService, database: Database, tmp_path: Path
) -> None:
    until = utc_now() + CLAIM
    adapter = await service.register(
        *("acme", "poet"),
        base_model="base",
        source=write_adapter(tmp_path / "poet"),
        claimed_until=until,
    )
    assert await service.validate_new() == 0, "another process validates it"
    await _change(database, adapter, claimed_until=utc_now() - CLAIM)
    assert await service.validate_new() == 1
    with pytest.raises(LostClaimError):
        await Claim(database, AdapterRow.claimed_until, adapter.id, until).change(
            state=AdapterState.FAILED
        )
    assert (await _row(database, adapter)).state is AdapterState.READY


async def test_adapter_deleted_during_its_validation_stays_deleted(
    service: AdapterService, database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_file = Blobs.put_file

    async def delete(blobs: Blobs, key: str, path: Path) -> None:
        await service.delete("acme", "poet")
        await put_file(blobs, key, path)

    monkeypatch.setattr(Blobs, "put_file", delete)
    adapter = await _register(service, "acme", "poet", write_adapter(tmp_path / "poet"))
    assert await service.validate_new() == 0
    row = await _row(database, adapter)
    assert (row.state, row.is_stored) == (AdapterState.DELETED, True)
    await _age(database, 2 * DAY)
    assert await service.remove_ended() == 1
    assert not list((tmp_path / "store" / "adapters").iterdir())


async def test_claim_is_renewed_while_the_work_runs(
    service: AdapterService, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims_module, "CLAIM", timedelta(seconds=0.3))
    adapter = await _register(service, "acme", "poet", UNREACHABLE)
    until = (await _row(database, adapter)).claimed_until
    claim = Claim(database, AdapterRow.claimed_until, adapter.id, until)

    async def until_renewed() -> None:
        while (await _row(database, adapter)).claimed_until == until:
            await asyncio.sleep(0.01)

    await claim.hold(until_renewed(), seconds=PATIENCE_SECONDS)
    await _change(database, adapter, claimed_until=until)
    with pytest.raises(LostClaimError):
        await claim.hold(asyncio.Event().wait(), seconds=PATIENCE_SECONDS)


@every_database
async def test_files_of_deleted_adapters_are_removed_unless_another_has_them(
    service: AdapterService, database: Database, tmp_path: Path
) -> None:
    source = write_adapter(tmp_path / "poet")
    poet, twin, other = [
        await service.add(tenant, name, base_model="base", source=folder)
        for tenant, name, folder in (
            ("acme", "poet", source),
            ("other", "twin", source),
            ("acme", "other", write_adapter(tmp_path / "other", alpha=3)),
        )
    ]
    folders = [tmp_path / "store" / folder_of(each.sha256) for each in (twin, other)]
    for adapter in (poet, other):
        await service.delete("acme", adapter.id)
    assert await service.remove_ended() == 0, "requests may still need them"
    await _age(database, 2 * DAY)
    # An adapter that is validated now has nothing to do with these files.
    await _register(service, "other", "new", UNREACHABLE)
    assert await service.remove_ended() == 1
    assert [folder.exists() for folder in folders] == [True, False]
    await service.delete("other", "twin")
    await _age(database, 2 * DAY)
    assert await service.remove_ended() == 1
    assert [folder.exists() for folder in folders] == [False, False]
    assert await service.remove_ended() == 0


async def test_files_that_cannot_be_removed_delay_no_other(
    service: AdapterService, database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    added = [
        await service.add(
            *("acme", f"n{at}"),
            base_model="base",
            source=write_adapter(tmp_path / f"{at}", alpha=at + 1),
        )
        for at in range(12)
    ]
    for each in added:
        await service.delete("acme", each.id)
    await _age(database, 2 * DAY)
    remove = AdapterCopier.remove

    async def fail(copier: AdapterCopier, sha256: str) -> None:
        if sha256 in {each.sha256 for each in added[:10]}:
            raise StoreUnavailableError("x")
        await remove(copier, sha256)

    monkeypatch.setattr(AdapterCopier, "remove", fail)
    with pytest.raises(StoreUnavailableError):
        await service.remove_ended()
    assert [(await _row(database, each)).is_stored for each in added] == [True] * 10 + [False] * 2
    monkeypatch.undo()
    assert await service.remove_ended() == 0, "they are claimed"
    await _age(database, timedelta(hours=1))
    assert await service.remove_ended() == 10


async def test_files_are_not_stored_while_they_are_removed(
    service: AdapterService, database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_adapter(tmp_path / "poet")
    await service.add("acme", "poet", base_model="base", source=source)
    await service.delete("acme", "poet")
    await _age(database, 2 * DAY)
    again = await _register(service, "acme", "poet", source)
    remove = AdapterCopier.remove

    async def validate(copier: AdapterCopier, sha256: str) -> None:
        assert await service.validate_new() == 0
        await remove(copier, sha256)

    monkeypatch.setattr(AdapterCopier, "remove", validate)
    assert await service.remove_ended() == 1
    assert (await _row(database, again)).reason == "Old copies of the files are being removed."
    await _change(database, again, claimed_until=utc_now() - CLAIM)
    assert await service.validate_new() == 1
    assert (tmp_path / "store" / folder_of((await _row(database, again)).sha256)).exists()
