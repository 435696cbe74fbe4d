"""An upgrade creates exactly the tables of the code, and changes older schemas to them."""

import asyncio
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from alembic import command
from alembic.script import ScriptDirectory
from sqlalchemy import insert, text
from sqlalchemy.ext.asyncio import AsyncSession

from gateway.billing.credits.spending import prepaid_cost
from gateway.billing.ledger.drain import row_of
from gateway.platform.database import schema
from gateway.platform.database.engine import Database
from gateway.platform.database.paging import list_records
from gateway.platform.database.partitions import make_partitions, months_from
from gateway.platform.database.schema import SchemaNotCurrentError, SchemaState
from gateway.platform.database.tables import LedgerRow, MemberRow, Table, TenantRow
from gateway.records.errors import InvalidParameterError, StartupError, StoreUnavailableError
from tests.support.cases import all_cases
from tests.support.kinds import every_database
from tests.support.usage import usage_record

NOW = datetime(2026, 12, 1, tzinfo=UTC)
BASELINE = "0006"
"""The revision of release 0.2.0."""
LOWEST = "0024"
"""The revision to which others can be taken back."""
_LEDGER = Table.metadata.tables[LedgerRow.__tablename__]
HEAD = ScriptDirectory.from_config(schema.alembic_config()).get_current_head()


async def _state(url: str) -> SchemaState:
    database = Database(url)
    try:
        return await schema.schema_state(database)
    finally:
        await database.aclose()


async def _create_baseline(database: Database) -> None:
    """Create the tables as release 0.2.0 made them, from a dump."""
    dialect = database.engine.dialect.name
    if dialect == "sqlite":
        Path(str(database.engine.url.database)).parent.mkdir()
    script = (Path(__file__).parent / f"schema_{BASELINE}" / f"{dialect}.sql").read_text()
    async with database.engine.connect() as connection:
        driver: Any = (await connection.get_raw_connection()).driver_connection
        await (driver.executescript if dialect == "sqlite" else driver.execute)(script)


async def _set_revision(database: Database, revision: str) -> None:
    async with database.writing() as transaction:
        await transaction.execute(
            text("UPDATE alembic_version SET version_num = :revision"), {"revision": revision}
        )


async def _spend(transaction: AsyncSession, *costs: int) -> None:
    """Add prepaid requests to the ledger, without the columns that revisions added."""
    columns = [column.name for column in _LEDGER.c if column.server_default is None]
    for cost in costs:
        row = row_of(usage_record(cost, is_prepaid=True, cost_micros=cost))
        await transaction.execute(insert(_LEDGER).values({name: row[name] for name in columns}))


@every_database
async def test_upgrade_creates_the_tables_of_the_code(database: Database) -> None:
    async with database.engine.connect() as connection:
        names = await connection.run_sync(lambda c: set(c.dialect.get_table_names(c)))
        assert names == {*Table.metadata.tables, "alembic_version"}
        # Raises where autogenerate would still find something to change.
        await connection.run_sync(lambda c: command.check(schema.alembic_config(c)))


@every_database
async def test_partitions_are_no_difference_between_tables_and_code(database: Database) -> None:
    async with database.writing() as transaction:
        made = await make_partitions(transaction, months_from(datetime(2026, 12, 31, tzinfo=UTC)))
    is_postgres = database.engine.dialect.name == "postgresql"
    names = ["usage_ledger_2026_12", "usage_ledger_2027_01", "usage_ledger_2027_02"]
    assert made == (names if is_postgres else [])
    async with database.writing() as transaction:
        assert await make_partitions(transaction, months_from(NOW)) == []
    async with database.engine.connect() as connection:
        await connection.run_sync(lambda c: command.check(schema.alembic_config(c)))


@every_database
async def test_revisions_turn_release_0_2_0_into_the_tables_of_the_code(
    empty_database_url: str,
) -> None:
    database = Database(empty_database_url)
    member = "'acme', 'ada', 'Ada', 'owner', '2026-01-01 00:00:00'"
    columns = "id, name, weight, status, created_at"
    tenant = "('acme', 'Acme', 1, 'active', '2026-01-01 00:00:00')"
    await _create_baseline(database)
    async with database.writing() as transaction:
        await transaction.execute(text(f"INSERT INTO tenants ({columns}) VALUES {tenant}"))
        await transaction.execute(text(f"INSERT INTO members VALUES ('m1', {member})"))
        await make_partitions(transaction, [datetime(2026, 11, 1, tzinfo=UTC)])
        await _spend(transaction, 7, 11)
    assert await schema.schema_state(database) is SchemaState.OUTDATED
    await schema.upgrade(empty_database_url)
    async with database.writer.begin() as connection:
        await connection.run_sync(lambda c: command.check(schema.alembic_config(c)))
        await connection.run_sync(lambda c: command.downgrade(schema.alembic_config(c), LOWEST))
    await schema.upgrade(empty_database_url)
    async with database.writing() as transaction:
        assert await schema.unprotected_tables(transaction) == []
        # The former release may still run, and does not name the new columns.
        later = tenant.replace("acme", "other")
        await transaction.execute(text(f"INSERT INTO tenants ({columns}) VALUES {later}"))
        await _spend(transaction, 13)
    async with database.reading() as transaction:
        assert await prepaid_cost(transaction, "acme") == 7 + 11 + 13
        tenants = await list_records(transaction, TenantRow)
        [owner] = await list_records(transaction, MemberRow)
    assert [(t.id, t.dialect, t.strict_parameters, t.default_model) for t in tenants] == [
        ("acme", None, False, None),
        ("other", None, False, None),
    ]
    assert (owner.subject, owner.role, owner.issuer, owner.email) == ("ada", "owner", None, None)
    await database.aclose()


@every_database
@pytest.mark.parametrize("revision", ["0005", "0023"])
async def test_preview_is_refused_with_the_way_to_upgrade_it(
    database: Database, database_url: str, revision: str
) -> None:
    await _set_revision(database, revision)
    with pytest.raises(SchemaNotCurrentError, match="outdated"):
        await schema.require_current_schema(database)
    with pytest.raises(StartupError, match=f"revision {revision}.* of the last preview of 0.2.0"):
        await schema.upgrade(database_url)


@every_database
async def test_empty_database_is_refused_until_it_is_upgraded(empty_database_url: str) -> None:
    database = Database(empty_database_url)
    with pytest.raises(SchemaNotCurrentError, match="sluice db upgrade"):
        await schema.require_current_schema(database)
    await schema.upgrade(empty_database_url)
    await schema.require_current_schema(database)
    await database.aclose()


@pytest.mark.parametrize(
    ("revision", "state"),
    [("0000_of_a_later_release", SchemaState.NEWER), (HEAD, SchemaState.CURRENT)],
)
async def test_state_follows_the_recorded_revision(
    database: Database, revision: str, state: SchemaState
) -> None:
    await _set_revision(database, revision)
    assert await schema.schema_state(database) is state
    await schema.require_current_schema(database)


@every_database
async def test_concurrent_upgrades_take_turns(empty_database_url: str) -> None:
    await asyncio.gather(*(schema.upgrade(empty_database_url) for _ in range(4)))
    assert await _state(empty_database_url) is SchemaState.CURRENT


async def test_reading_the_state_creates_no_file(tmp_path: Path) -> None:
    file = tmp_path / "none" / "sluice.db"
    assert await _state(f"sqlite+aiosqlite:///{file}") is SchemaState.EMPTY
    assert not file.parent.exists()


async def test_unreachable_database_is_a_store_error(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailableError):
        await _state(f"postgresql+asyncpg://postgres@/none?host={tmp_path}")


@all_cases("url", ["", "mysql://u:secret@h/d", "sqlite:///f.db", "secret"])
def test_other_databases_are_refused_without_repeating_the_url(url: str) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        Database(url)
    assert "postgresql://USER" in caught.value.message
    assert "secret" not in caught.value.message
