"""Claims of rows: in turns of their owners, once at a time, and again after they expire."""

from datetime import timedelta

import pytest

from gateway.accounts.tenants.service import TenantService
from gateway.platform.database.claims import Claim, LostClaimError, lock_in_turns
from gateway.platform.database.engine import Database
from gateway.platform.database.tables import AdapterRow
from gateway.records.adapters import AdapterState
from gateway.records.times import EPOCH, utc_now
from tests.support.kinds import every_database

NOW = utc_now()
MINUTE = timedelta(minutes=1)


@pytest.fixture
async def rows(database: Database, tenants: TenantService) -> None:
    """Adapters that nobody works on: 40 of one tenant in two folders, then two of another."""
    for tenant in ("many", "few"):
        await tenants.create(tenant, tenant_id=tenant)
    names = [("many", "a" if at < 30 else "b", at) for at in range(40)]
    names += [("few", "c", 40 + at) for at in range(2)]
    async with database.writing() as transaction:
        transaction.add_all(
            AdapterRow(
                id=f"{tenant}-{source}-{at:02}",
                tenant_id=tenant,
                name=f"n{at}",
                base_model="m",
                source=source,
                is_shared=False,
                state=AdapterState.VALIDATING,
                reason="",
                sha256="",
                rank=0,
                target_modules=[],
                size=0,
                is_stored=False,
                created_at=NOW + MINUTE * at,
                claimed_until=EPOCH,
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
    first = Claim(database, AdapterRow, "few-c-40", EPOCH)
    other = Claim(database, AdapterRow, "few-c-40", EPOCH)
    await other.change(claimed_until=NOW, reason="other")
    with pytest.raises(LostClaimError):
        await first.change(claimed_until=NOW + MINUTE, reason="first")
    await other.change(reason="still other")
    async with database.reading() as transaction:
        row = await transaction.get_one(AdapterRow, "few-c-40")
        assert (row.claimed_until, row.reason) == (NOW, "still other")
