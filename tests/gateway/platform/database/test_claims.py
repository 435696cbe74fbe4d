"""Claims of rows: in turns of their owners, once at a time, and again after they expire."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any, NamedTuple

import pytest
from sqlalchemy import update
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import InstrumentedAttribute

from gateway.accounts.tenants.service import TenantService
from gateway.accounts.webhooks.service import EventName, WebhookService, add_events, make_event
from gateway.batches.files.service import FileStore, claim_removable
from gateway.batches.store import BatchStore
from gateway.jobs.schedule import JobServices
from gateway.platform.database import claims
from gateway.platform.database.claims import Claim, LostClaimError, Slots, lock_in_turns
from gateway.platform.database.engine import Database
from gateway.platform.database.tables import (
    AdapterRow,
    BatchChunkRow,
    BatchRow,
    ExportSinkRow,
    FileRow,
    WebhookEventRow,
)
from gateway.platform.settings import load_settings
from gateway.records.adapters import AdapterState
from gateway.records.batches import Chunk, File, FilePurpose
from gateway.records.times import EPOCH, utc_now
from tests.support.batches import running_batch
from tests.support.cases import case
from tests.support.kinds import every_database
from tests.support.patience import PATIENCE_SECONDS
from tests.support.redis_server import RedisServer
from tests.support.secret_box import BOX, ENCRYPTION_KEY

NOW = utc_now()
MINUTE = timedelta(minutes=1)
SINKS = [{"name": f"sink-{at}", "kind": "openmeter", "url": "http://[::1]:9"} for at in range(3)]


def adapter(tenant: str, name: str, **columns: Any) -> AdapterRow:
    """Return an adapter that nobody works on."""
    return AdapterRow(
        **{
            "id": name,
            "tenant_id": tenant,
            "name": name,
            "base_model": "m",
            "source": "",
            "is_shared": False,
            "state": AdapterState.VALIDATING,
            "reason": "",
            "sha256": name,
            "rank": 0,
            "target_modules": [],
            "size": 0,
            "is_stored": False,
            "created_at": NOW,
            "claimed_until": EPOCH,
            **columns,
        }
    )


class Plan(NamedTuple):
    """A table whose rows are claimed."""

    end: InstrumentedAttribute[Any]
    """Column with the ends of claims."""
    plant: Callable[[JobServices, str, str], Awaitable[None]]
    """Adds a due row of a tenant with an id."""
    claim: Callable[[JobServices, int], Awaitable[Collection[Any]]]
    """Claims so many rows, and returns their keys."""


def _of(field: str, *, kept: int = 0) -> Callable[[JobServices, int], Awaitable[Collection[Any]]]:
    """Return the claims of the slots that a service has in a field.

    Of its free slots, it keeps so many for tenants that have none.
    """

    async def claim(services: JobServices, limit: int) -> Collection[Any]:
        slots: Any = services
        for name in field.split("."):
            slots = getattr(slots, name)
        claimed: Collection[Any] = await slots._claim(limit + kept, ())
        return claimed

    return claim


async def _plant_validation(services: JobServices, tenant: str, name: str) -> None:
    async with services.database.writing() as transaction:
        transaction.add(adapter(tenant, name))


async def _plant_removal(services: JobServices, tenant: str, name: str) -> None:
    ended = {"state": AdapterState.DELETED, "is_stored": True, "deleted_at": EPOCH}
    async with services.database.writing() as transaction:
        transaction.add(adapter(tenant, name, **ended))


async def _plant_event(services: JobServices, tenant: str, name: str) -> None:
    webhooks = WebhookService(services.database, BOX)
    webhook = await webhooks.create(tenant, f"https://{name}.example.com/")
    event = replace(make_event(EventName(webhook.id, "k", name, "", 1), tenant, {}), id=name)
    async with services.database.writing() as transaction:
        await add_events(transaction, [event])


async def _plant_batch(services: JobServices, tenant: str, name: str) -> None:
    batch = running_batch(tenant, name, created_at=EPOCH, expires_at=NOW + 99 * MINUTE)
    async with services.database.writing() as transaction:
        await BatchStore(transaction).add(batch)


async def _plant_chunk(services: JobServices, tenant: str, name: str) -> None:
    await _plant_batch(services, tenant, name)
    chunk = Chunk(batch_id=name, number=1, first_line=1, lines=1, start=0, size=1)
    async with services.database.writing() as transaction:
        await BatchStore(transaction).add_chunks([chunk])
        await BatchStore(transaction).release(tenant, 1, NOW)


async def _plant_file(services: JobServices, tenant: str, name: str) -> None:
    file = File(
        id=name,
        tenant_id=tenant,
        project_id=None,
        name="",
        purpose=FilePurpose.BATCH,
        size=0,
        lines=0,
        created_at=NOW,
        expires_at=EPOCH,
    )
    async with services.database.writing() as transaction:
        await FileStore(transaction).add(file, is_visible=True)


async def _plant_nothing(_services: JobServices, _tenant: str, _name: str) -> None:
    """The sinks register themselves."""


async def _claim_sinks(services: JobServices, limit: int) -> Collection[Any]:
    services.exporter._due = set(services.exporter._sinks)
    return await services.exporter._claim(limit, ())


async def _claim_files(services: JobServices, limit: int) -> Collection[Any]:
    async with services.database.writing() as transaction:
        return await claim_removable(transaction, utc_now(), limit)


async def _claim_chunks(services: JobServices, limit: int) -> Collection[Any]:
    async with services.database.writing() as transaction:
        found = await BatchStore(transaction).claim_chunks("gateway", utc_now(), limit=limit)
    return [each.chunk.batch_id for each in found]


PLANS = {
    "validation of an adapter": Plan(
        AdapterRow.claimed_until, _plant_validation, _of("adapters._validating", kept=1)
    ),
    "removal of an adapter": Plan(
        AdapterRow.claimed_until, _plant_removal, _of("adapters._removing")
    ),
    "event": Plan(WebhookEventRow.next_attempt_at, _plant_event, _of("webhooks")),
    "sink": Plan(ExportSinkRow.leased_until, _plant_nothing, _claim_sinks),
    "file": Plan(FileRow.expires_at, _plant_file, _claim_files),
    "batch": Plan(BatchRow.claimed_until, _plant_batch, _of("finisher", kept=1)),
    "chunk": Plan(BatchChunkRow.leased_until, _plant_chunk, _claim_chunks),
}


@every_database
async def test_each_kind_of_row_is_claimed_fairly_once_until_the_claim_expires(
    database_url: str, redis_server: RedisServer, tenants: TenantService
) -> None:
    settings = load_settings(
        redis_url=redis_server.url,
        database_url=database_url,
        encryption_keys=ENCRYPTION_KEY,
        export_sinks=SINKS,  # type: ignore[arg-type]
    )
    for tenant in ("many", "few"):
        await tenants.create(tenant, tenant_id=tenant)
    async with (
        aclosing(JobServices(settings)) as services,
        aclosing(JobServices(settings)) as others,
    ):
        for kind, plan in PLANS.items():
            with case(kind):
                await _check(plan, services, others, kind.replace(" ", "-"))


async def _check(plan: Plan, services: JobServices, others: JobServices, kind: str) -> None:
    names = [f"{kind}-{at}" for at in range(3)]
    for name, tenant in zip(names, ("many", "many", "few"), strict=True):
        await plan.plant(services, tenant, name)
    found = await asyncio.gather(plan.claim(services, 99), plan.claim(others, 99))
    assert sorted([*found[0], *found[1]]) == names, "each row is claimed by one process"
    assert not await plan.claim(others, 99)
    await _end_claims(services, plan, EPOCH)
    assert names[-1] in await plan.claim(others, 2), "tenants take turns"
    await _end_claims(services, plan, NOW + 99 * MINUTE)


async def _end_claims(services: JobServices, plan: Plan, at: datetime) -> None:
    async with services.database.writing() as transaction:
        await transaction.execute(update(plan.end.class_).values({plan.end.key: at}))


@pytest.fixture
async def rows(database: Database, tenants: TenantService) -> None:
    """Adapters that nobody works on: 40 of one tenant in two folders, then two of another."""
    for tenant in ("many", "few"):
        await tenants.create(tenant, tenant_id=tenant)
    names = [("many", "a" if at < 30 else "b", at) for at in range(40)]
    names += [("few", "c", 40 + at) for at in range(2)]
    async with database.writing() as transaction:
        transaction.add_all(
            adapter(
                tenant, f"{tenant}-{source}-{at:02}", source=source, created_at=NOW + MINUTE * at
            )
            for tenant, source, at in names
        )


async def claimed(database: Database, limit: int) -> list[str]:
    """Claim rows for a minute; return their ids."""
    async with database.writing() as transaction:
        found = await lock_in_turns(
            transaction,
            AdapterRow,
            is_due=AdapterRow.claimed_until <= NOW,
            is_held=AdapterRow.claimed_until > NOW,
            owners=(AdapterRow.tenant_id, AdapterRow.source),
            order=AdapterRow.created_at,
            limit=limit,
        )
        for row in found:
            row.claimed_until = NOW + MINUTE
    return sorted(row.id for row in found)


@every_database
@pytest.mark.usefixtures("rows")
async def test_owners_take_turns_at_both_levels(database: Database) -> None:
    assert await claimed(database, 4) == ["few-c-40", "few-c-41", "many-a-00", "many-b-30"]
    assert await claimed(database, 4) == ["many-a-01", "many-a-02", "many-b-31", "many-b-32"]


@every_database
@pytest.mark.usefixtures("rows")
async def test_owner_with_held_rows_waits_for_others(database: Database) -> None:
    async with database.writing() as transaction:
        for at in range(3):
            row = await transaction.get_one(AdapterRow, f"many-a-{at:02}")
            row.claimed_until = NOW + MINUTE
    assert await claimed(database, 3) == ["few-c-40", "few-c-41", "many-b-30"]


@pytest.mark.parametrize("database_kind", ["postgresql"], indirect=True)
@pytest.mark.usefixtures("rows")
async def test_locked_row_delays_nobody(database: Database) -> None:
    async with database.writing() as transaction:
        await transaction.get_one(AdapterRow, "many-a-00", with_for_update=True)
        assert await claimed(database, 3) == ["few-c-40", "few-c-41", "many-b-30"]


@every_database
@pytest.mark.usefixtures("rows")
async def test_lost_claim_changes_nothing(database: Database) -> None:
    first = Claim(database, AdapterRow.claimed_until, "few-c-40", EPOCH)
    other = Claim(database, AdapterRow.claimed_until, "few-c-40", EPOCH)
    await other.change(claimed_until=NOW, reason="other")
    with pytest.raises(LostClaimError):
        await first.change(claimed_until=NOW + MINUTE, reason="first")
    await other.change(reason="still other")
    async with database.reading() as transaction:
        row = await transaction.get_one(AdapterRow, "few-c-40")
        assert (row.claimed_until, row.reason) == (NOW, "still other")


@pytest.mark.usefixtures("rows")
async def test_claim_whose_renewal_is_cancelled_as_it_is_stored_can_be_given_back(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    writing = database.writing

    @asynccontextmanager
    async def cancelled() -> AsyncIterator[AsyncSession]:
        async with writing() as transaction:
            yield transaction
        raise asyncio.CancelledError

    claim = Claim(database, AdapterRow.claimed_until, "few-c-40", EPOCH)
    monkeypatch.setattr(database, "writing", cancelled)
    with pytest.raises(asyncio.CancelledError):
        await claim.change(claimed_until=NOW + MINUTE)
    monkeypatch.undo()
    await claim.change(claimed_until=NOW, reason="given back")
    async with database.reading() as transaction:
        assert (await transaction.get_one(AdapterRow, "few-c-40")).reason == "given back"


async def test_run_looks_again_if_an_item_ended_while_it_looked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(claims, "LOOK_SECONDS", 0.01)
    may_end = asyncio.Event()
    done: list[str] = []

    async def claim(_free: int, held: Collection[str]) -> dict[str, str]:
        if held:
            # The owner may have one item at once, which ends now.
            may_end.set()
            while held:
                await asyncio.sleep(0)
            return {}
        return {name: name for name in ["first", "second"][len(done) :][:1]}

    async def work(item: str) -> bool:
        await may_end.wait()
        done.append(item)
        return True

    assert await Slots(2, claim, work).run(seconds=PATIENCE_SECONDS) == 2
    assert done == ["first", "second"]
