"""Connections to the SQL database: an SQLite file, or PostgreSQL."""

import asyncio
import sqlite3
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from sqlalchemy import Connection, Engine, event
from sqlalchemy.engine import URL, make_url
from sqlalchemy.engine.interfaces import DBAPIConnection, ExceptionContext
from sqlalchemy.exc import (
    ArgumentError,
    DBAPIError,
    IntegrityError,
    ProgrammingError,
)
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.pool import ConnectionPoolEntry, QueuePool

from gateway.platform import store_telemetry
from gateway.platform.database.postgresql_url import (
    POSTGRESQL_PORT,
    SCHEMES,
    connect_arguments,
    with_hosts_in_query,
)
from gateway.platform.store_errors import cause_of, lacks_permission
from gateway.records.errors import InvalidParameterError, StoreUnavailableError

POOL_SIZE: Final = 5
"""Connections to PostgreSQL that stay open: keys are cached, so more would only burden it."""
MOST_CONNECTIONS: Final = 2 * POOL_SIZE
"""Connections of a gateway."""
TIMEOUT_SECONDS: Final = 5.0
"""Timeout for taking a connection, for waiting for a lock, and for one statement."""
_WITHOUT_PREPARED_STATEMENTS: Final = {
    "statement_cache_size": 0,
    "prepared_statement_cache_size": 0,
    "prepared_statement_name_func": str,
}
"""A pooler in transaction mode gives each transaction another server process, which has none of
the statements that another one has prepared. Without a name, each is prepared where it runs."""
_LOOK_SECONDS: Final = 0.01
"""Pause between two looks at open transactions when the database is closed."""

_BEGIN = "sluice_begin"

OPERATIONS: Final = frozenset({"select", "insert", "update", "delete"})
OTHER: Final = "other"
_BEGAN: Final = "sluice_statement_began"


class Database:
    """A database engine and its transactions."""

    def __init__(
        self,
        url: str,
        *,
        statement_timeout_seconds: float | None = TIMEOUT_SECONDS,
        most_connections: int = MOST_CONNECTIONS,
    ) -> None:
        self.engine = create_engine(url, statement_timeout_seconds, most_connections)
        measure(self.engine.sync_engine)
        self.writer = self.engine.execution_options(**{_BEGIN: "BEGIN IMMEDIATE"})
        """Like `engine`, but on SQLite a transaction takes the write lock when it begins."""
        is_postgresql = self.engine.dialect.name == "postgresql"
        self._connection_seconds = TIMEOUT_SECONDS if is_postgresql else None
        self._snapshots = self.engine
        # A transaction of SQLite is always a snapshot.
        if is_postgresql:
            self._snapshots = self.engine.execution_options(isolation_level="REPEATABLE READ")

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[AsyncSession]:
        """Open a read-only transaction."""
        async with self._reading(self.engine) as transaction:
            yield transaction

    @asynccontextmanager
    async def snapshot(self) -> AsyncIterator[AsyncSession]:
        """Open a read-only transaction that sees nothing committed after its first query."""
        async with self._reading(self._snapshots) as transaction:
            yield transaction

    @asynccontextmanager
    async def writing(self) -> AsyncIterator[AsyncSession]:
        """Open a transaction that commits at the end of the block, or rolls back on an error."""
        with self.converting_errors():
            async with (
                AsyncSession(self.writer, expire_on_commit=False) as transaction,
                transaction.begin(),
            ):
                await self._take_connection(transaction)
                yield transaction

    @contextmanager
    def converting_errors(self) -> Iterator[None]:
        """Convert every error of an unavailable database to StoreUnavailableError."""
        try:
            yield
        except (DBAPIError, PoolTimeoutError, OSError, TimeoutError) as error:
            # Without a statement, the server has rejected a parameter of the connection.
            is_of_statement = isinstance(error, IntegrityError) or (
                isinstance(error, ProgrammingError) and error.statement is not None
            )
            if is_of_statement and not lacks_permission(error):
                raise
            raise StoreUnavailableError(
                "The database cannot be reached at the moment.",
                detail=f"{describe(self.engine.url)}: {cause_of(error)}.",
                retry_after_seconds=1.0,
            ) from error

    @asynccontextmanager
    async def _reading(self, engine: AsyncEngine) -> AsyncIterator[AsyncSession]:
        with self.converting_errors():
            async with AsyncSession(engine, expire_on_commit=False) as transaction:
                await self._take_connection(transaction)
                yield transaction

    async def _take_connection(self, transaction: AsyncSession) -> None:
        # The wait for the pool, the check of a pooled connection, its end and a new connection have
        # a timeout each, which add up while the database does not respond.
        if self._connection_seconds is not None:
            async with asyncio.timeout(self._connection_seconds):
                _ = await transaction.connection()
            return
        # The thread of a new connection opens the file even if this task is cancelled, and nothing
        # would close it. The transaction that then ends returns the connection to the pool.
        taking = asyncio.ensure_future(transaction.connection())
        try:
            _ = await asyncio.shield(taking)
        except asyncio.CancelledError:
            while not taking.done():
                with suppress(asyncio.CancelledError):
                    await asyncio.wait({taking})
            _ = taking.cancelled() or taking.exception()
            raise

    async def aclose(self) -> None:
        """Close all connections, after the end of open transactions, or after `TIMEOUT_SECONDS`."""
        # A cancelled task may leave the end of a transaction to another one. A connection that
        # returns after the end of its pool would never be closed.
        pool = self.engine.pool
        assert isinstance(pool, QueuePool)  # noqa: S101 - both kinds of databases use it
        for _ in range(round(TIMEOUT_SECONDS / _LOOK_SECONDS)):
            if not pool.checkedout():
                break
            await asyncio.sleep(_LOOK_SECONDS)
        await self.engine.dispose()


def create_engine(
    url: str, statement_timeout_seconds: float | None, most_connections: int = MOST_CONNECTIONS
) -> AsyncEngine:
    """Return an engine that is not connected yet.

    The URL is `sqlite+aiosqlite:///FILE` or `postgresql://...`.
    """
    parsed = parse_url(url)
    if parsed.get_backend_name() == "sqlite":
        return _create_sqlite_engine(parsed, most_connections)
    plain, arguments = connect_arguments(parsed, most_seconds=TIMEOUT_SECONDS)
    return create_async_engine(
        plain,
        pool_size=POOL_SIZE,
        max_overflow=most_connections - POOL_SIZE,
        pool_timeout=TIMEOUT_SECONDS,
        pool_pre_ping=True,
        hide_parameters=True,
        connect_args={
            **arguments,
            "command_timeout": statement_timeout_seconds,
            **_WITHOUT_PREPARED_STATEMENTS,
        },
    )


def parse_url(url: str) -> URL:
    """Parse the database URL.

    The error for an invalid URL omits it, as it may contain a password.
    """
    try:
        parsed = make_url(with_hosts_in_query(url))
    except (ArgumentError, ValueError):
        parsed = None
    if parsed is None or parsed.drivername not in ("sqlite+aiosqlite", *SCHEMES):
        raise InvalidParameterError(
            "The database URL must have the form sqlite+aiosqlite:///FILE or "
            "postgresql://USER:PASSWORD@HOST/NAME.",
            param="database_url",
        )
    return parsed


def describe(url: URL) -> str:
    """Return the file or the server of a database, without a password."""
    if url.get_backend_name() == "sqlite":
        return f"The SQLite file {Path(url.database).absolute()}" if url.database else "SQLite"
    port = url.port or POSTGRESQL_PORT
    # Hosts of the query may have their own ports.
    hosts = url.normalized_query.get("host", (f"{url.host or 'its default socket'}:{port}",))
    return f"PostgreSQL at {', '.join(each if ':' in each else f'{each}:{port}' for each in hosts)}"


def _create_sqlite_engine(url: URL, most_connections: int) -> AsyncEngine:
    engine = create_async_engine(
        url,
        # Each connection is a thread, which takes longer to start than most statements.
        pool_size=most_connections,
        max_overflow=0,
        pool_timeout=TIMEOUT_SECONDS,
        hide_parameters=True,
        connect_args={"timeout": TIMEOUT_SECONDS},
    )
    event.listen(engine.sync_engine, "connect", _prepare_sqlite_connection)
    event.listen(engine.sync_engine, "begin", _begin_sqlite_transaction)
    return engine


def _prepare_sqlite_connection(connection: Any, _record: object) -> None:
    # The driver must not begin transactions itself: it would begin them too late and with too weak
    # a lock.
    connection.isolation_level = None
    cursor = connection.cursor()
    # Changing the mode does not wait for locks. But a connection that holds a lock runs this too,
    # and the mode is stored in the file: that connection sets it, or the next one does.
    with suppress(sqlite3.OperationalError):
        cursor.execute("PRAGMA journal_mode = WAL")
    cursor.execute("PRAGMA synchronous = NORMAL")
    cursor.execute("PRAGMA foreign_keys = ON")
    cursor.close()


def _begin_sqlite_transaction(connection: Connection) -> None:
    # A transaction that reads first and writes later fails at once if another one wrote in between.
    # A writing transaction therefore takes the write lock when it begins, where the busy timeout
    # applies.
    connection.exec_driver_sql(connection.get_execution_options().get(_BEGIN, "BEGIN"))


def measure(engine: Engine) -> None:
    """Record every statement of an engine, and of those that share its connections."""
    event.listen(engine, "before_cursor_execute", _begin)
    event.listen(engine, "after_cursor_execute", _end)
    event.listen(engine, "handle_error", _fail)
    if engine.dialect.name == "postgresql":
        event.listen(engine, "connect", _record_certificate)


def operation_of(statement: str) -> str:
    """Return the type of the statement, by its first word."""
    word = statement[:16].lstrip()[:6].lower()
    return word if word in OPERATIONS else OTHER


def _begin(connection: Any, *_details: object) -> None:
    # A connection executes one statement at a time.
    connection.info[_BEGAN] = time.perf_counter()


def _end(connection: Any, _cursor: object, statement: str, *_details: object) -> None:
    seconds = time.perf_counter() - connection.info[_BEGAN]
    store_telemetry.SQL_SECONDS.labels(operation_of(statement)).observe(seconds)


def _fail(failure: ExceptionContext) -> None:
    # Without a statement the connection failed, which is not the failure of a statement.
    if failure.statement is not None:
        store_telemetry.SQL_ERRORS.labels(operation_of(failure.statement)).inc()


def tls_of(driver: Any) -> Any:
    """Return the TLS object of a connection of asyncpg; None if it is not encrypted."""
    return driver._transport.get_extra_info("ssl_object")  # noqa: SLF001 - no public API


def _record_certificate(connection: DBAPIConnection, _entry: ConnectionPoolEntry) -> None:
    encrypted = tls_of(connection.driver_connection)
    if encrypted is None:
        return
    certificate = encrypted.getpeercert(binary_form=True)
    if certificate is not None:
        store_telemetry.certificate_shown("database", certificate)
