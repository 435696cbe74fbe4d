"""Upgrade the database schema, and check whether it is current and protects its rows."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from enum import Enum
from pathlib import Path
from typing import Final

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, text
from sqlalchemy.engine import URL
from sqlalchemy.ext.asyncio import AsyncSession
from typing_extensions import override

from gateway.platform.database.engine import Database, describe
from gateway.platform.database.tables import Table
from gateway.records.errors import StartupError

MIGRATIONS: Final = Path(__file__).parent / "migrations"
UPGRADE_LOCK: Final = 7_585_423
"""PostgreSQL advisory lock that an upgrade holds, so that two never run at once."""
UPGRADE_WAIT_SECONDS: Final = 60
"""How long an upgrade waits for another one."""
TABLE_WAIT_SECONDS: Final = 4
"""Lock timeout of a revision: while it waits for a table, it blocks every later query."""
STATEMENT_SECONDS: Final = 60

_TOO_OLD: Final = frozenset(f"{number:04}" for number in range(1, 24)) - {"0006"}
"""Revisions of previews, which this code cannot upgrade. 0006 is release 0.2.0."""

_APPEND_ONLY: Final = ("audit_log", "credits", "price_removals", "prices", "usage_ledger")
"""Tables whose rows only their triggers protect from changes and removals."""
# A partition has its own trigger, which can be disabled alone; 27 is BEFORE UPDATE OR DELETE of
# each row. The source is compared because a replaced function or trigger could let changes pass.
_UNPROTECTED: Final = text(
    """
    SELECT coalesce(CAST(tree.relid AS text), name) FROM unnest(CAST(:tables AS text[])) AS name
    LEFT JOIN pg_partition_tree(to_regclass(name)) AS tree ON true
    WHERE NOT EXISTS (
        SELECT FROM pg_trigger JOIN pg_proc ON pg_proc.oid = tgfoid
        WHERE tgrelid = coalesce(tree.relid, to_regclass(name))
        AND tgtype = 27 AND tgqual IS NULL AND CAST(tgattr AS text) = ''
        AND (tgenabled = 'A' OR tgenabled = CASE
            WHEN current_setting('session_replication_role') = 'replica' THEN 'R' ELSE 'O' END)
        AND btrim(prosrc, E' \\n') = :source
    ) ORDER BY 1
    """
)
_SOURCE: Final = "BEGIN RAISE EXCEPTION 'rows of % are only ever added', TG_TABLE_NAME; END"


class SchemaState(Enum):
    """State of the database's schema relative to this code."""

    EMPTY = "empty"  # No revision is applied.
    OUTDATED = "outdated"  # Revisions are missing, or it is of a preview.
    CURRENT = "current"
    NEWER = "newer"  # Created by a later release; revisions are additive, so this code runs on it.

    @property
    def is_usable(self) -> bool:
        """Whether this code can run on it."""
        return self in (SchemaState.CURRENT, SchemaState.NEWER)


class SchemaNotCurrentError(StartupError):
    """The database must be upgraded before anything can run on it."""

    def __init__(self, url: URL, state: SchemaState) -> None:
        super().__init__(
            f"{describe(url)}: its schema is {state.value}. Run `sluice db upgrade` first."
        )
        self.state = state


async def upgrade(url: str) -> None:
    """Create or upgrade the schema; waits while another process upgrades it.

    Raises StartupError for the schema of a preview before 0.3.0.
    """
    database = Database(url, statement_timeout_seconds=None)
    try:
        with database.converting_errors():
            if (file := _file(database.engine.url)) is not None:
                file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            async with database.writer.begin() as connection:
                await connection.run_sync(_upgrade)
    finally:
        await database.aclose()


async def schema_state(database: Database) -> SchemaState:
    """Compare the database's revision with the newest one in this code."""
    file = _file(database.engine.url)
    with database.converting_errors():
        if file is not None and not file.exists():
            # A query would create an empty file, or fail if its folder does not exist.
            return SchemaState.EMPTY
        async with database.engine.connect() as connection:
            return await connection.run_sync(_state)


async def require_current_schema(database: Database) -> None:
    """Raise SchemaNotCurrentError if this code cannot run on the database's schema."""
    state = await schema_state(database)
    if not state.is_usable:
        raise SchemaNotCurrentError(database.engine.url, state)


async def check_schema(url: str) -> None:
    """Raise SchemaNotCurrentError if this code cannot run on the database at `url`."""
    database = Database(url)
    try:
        await require_current_schema(database)
    finally:
        await database.aclose()


async def unprotected_tables(transaction: AsyncSession) -> list[str]:
    """Return the append-only tables and partitions whose triggers are not as `upgrade` made them.

    Their rows can be changed: a trigger is missing, disabled, or has another definition.
    """
    if transaction.get_bind().dialect.name == "postgresql":
        wanted = {"tables": list(_APPEND_ONLY), "source": _SOURCE}
        return list(await transaction.scalars(_UNPROTECTED, wanted))
    query = text("SELECT sql FROM sqlite_master WHERE type = 'trigger'")
    found = set(await transaction.scalars(query))
    return [table for table in _APPEND_ONLY if not found.issuperset(_triggers(table, "sqlite"))]


class CheckedDatabase(Database):
    """A database whose first transaction raises SchemaNotCurrentError if the schema is unusable.

    Callers that check their input before the first transaction need no database to reject it.
    """

    _is_checked = False

    @override
    @asynccontextmanager
    async def reading(self) -> AsyncIterator[AsyncSession]:
        await self._check()
        async with super().reading() as transaction:
            yield transaction

    @override
    @asynccontextmanager
    async def writing(self) -> AsyncIterator[AsyncSession]:
        await self._check()
        async with super().writing() as transaction:
            yield transaction

    async def _check(self) -> None:
        if not self._is_checked:
            await require_current_schema(self)
            self._is_checked = True


def alembic_config(connection: Connection | None = None) -> Config:
    """Return alembic's configuration, which is not stored in a file."""
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    config.attributes["connection"] = connection
    return config


def _upgrade(connection: Connection) -> None:
    # On SQLite the transaction holds the write lock from the start.
    if connection.dialect.name == "postgresql":
        _take_turns(connection)
    revision = MigrationContext.configure(connection).get_current_revision()
    if revision in _TOO_OLD:
        raise StartupError(
            f"{describe(connection.engine.url)}: its schema has revision {revision}, of a preview. "
            "Run `sluice db upgrade` of the last preview of 0.2.0 (25 November 2026 or later) "
            "first, and then of this release."
        )
    if revision is None:
        _create(connection)
    else:
        command.upgrade(alembic_config(connection), "head")


def _create(connection: Connection) -> None:
    """Create the tables of this code, and record the newest revision.

    Revisions only change databases of earlier releases. So a new database needs none of them, and
    they do not depend on the tables of this code.
    """
    Table.metadata.create_all(connection, checkfirst=False)
    dialect = connection.dialect.name
    if dialect == "postgresql":
        connection.exec_driver_sql(
            "CREATE FUNCTION sluice_append_only() RETURNS trigger LANGUAGE plpgsql "
            f"AS $$ {_SOURCE} $$"
        )
    triggers = [each for table in _APPEND_ONLY for each in _triggers(table, dialect)]
    for statement in (*triggers, *_summing(dialect)):
        connection.exec_driver_sql(statement)
    command.stamp(alembic_config(connection), "head")


def _triggers(table: str, dialect: str) -> list[str]:
    """Return the statements that protect the rows of a table."""
    if dialect == "postgresql":
        # Partitions inherit the trigger when they are attached.
        events = f"BEFORE UPDATE OR DELETE ON {table}"
        function = "FOR EACH ROW EXECUTE FUNCTION sluice_append_only()"
        return [f"CREATE TRIGGER {table}_append_only {events} {function}"]
    return [
        f"CREATE TRIGGER {table}_no_{verb.lower()} BEFORE {verb} ON {table} "
        f"BEGIN SELECT RAISE(ABORT, 'rows of {table} are only ever added'); END"
        for verb in ("UPDATE", "DELETE")
    ]


def _summing(dialect: str) -> list[str]:
    """Return the statements that make the ledger add to the sums of prepaid requests."""
    event = "CREATE TRIGGER usage_ledger_prepaid_sums AFTER INSERT ON usage_ledger"
    insertion = "INSERT INTO prepaid_sums (tenant_id, cost_micros)"
    if dialect == "sqlite":
        values = "VALUES (NEW.tenant_id, NEW.cost_micros)"
        return [f"{event} WHEN NEW.is_prepaid BEGIN {insertion} {values}; END"]
    sums = "SELECT tenant_id, sum(cost_micros) FROM added WHERE is_prepaid GROUP BY tenant_id"
    body = f"BEGIN {insertion} {sums}; RETURN NULL; END"
    rows = "REFERENCING NEW TABLE AS added FOR EACH STATEMENT"
    return [
        f"CREATE FUNCTION sluice_sum_prepaid() RETURNS trigger LANGUAGE plpgsql AS $$ {body} $$",
        f"{event} {rows} EXECUTE FUNCTION sluice_sum_prepaid()",
    ]


def _take_turns(connection: Connection) -> None:
    for statement in (
        f"SET LOCAL lock_timeout = '{UPGRADE_WAIT_SECONDS}s'",
        f"SELECT pg_advisory_xact_lock({UPGRADE_LOCK})",
        f"SET LOCAL lock_timeout = '{TABLE_WAIT_SECONDS}s'",
        f"SET LOCAL statement_timeout = '{STATEMENT_SECONDS}s'",
    ):
        connection.exec_driver_sql(statement)


def _state(connection: Connection) -> SchemaState:
    revision = MigrationContext.configure(connection).get_current_revision()
    if revision is None:
        return SchemaState.EMPTY
    scripts = ScriptDirectory.from_config(alembic_config())
    if revision == scripts.get_current_head():
        return SchemaState.CURRENT
    known = _TOO_OLD.union(script.revision for script in scripts.walk_revisions())
    return SchemaState.OUTDATED if revision in known else SchemaState.NEWER


def _file(url: URL) -> Path | None:
    """Return the file of an SQLite database; None if there is none."""
    if url.get_backend_name() != "sqlite" or url.database in (None, "", ":memory:"):
        return None
    return Path(url.database)
