"""Connections to the SQL database: SQLite in a file, or PostgreSQL."""

import sqlite3
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any, Final

from sqlalchemy import Connection, event
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import (
    ArgumentError,
    DBAPIError,
    IntegrityError,
    NoSuchModuleError,
    ProgrammingError,
)
from sqlalchemy.exc import (
    TimeoutError as PoolTimeoutError,
)
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine

from gateway.accounts.measuring import measure
from gateway.errors import InvalidParameterError, StoreUnavailableError

POOL_SIZE: Final = 5
"""Connections of one gateway: keys are cached, so many more would only burden the database."""
TIMEOUT_SECONDS: Final = 5.0
"""For connecting, for waiting for a pooled connection or a lock, and for one statement."""

_BEGIN = "sluice_begin"


class Database:
    """One engine, and transactions on it."""

    def __init__(
        self, url: str, *, statement_timeout_seconds: float | None = TIMEOUT_SECONDS
    ) -> None:
        self.engine = create_engine(url, statement_timeout_seconds)
        measure(self.engine.sync_engine)
        self.writer = self.engine.execution_options(**{_BEGIN: "BEGIN IMMEDIATE"})
        """The same connections; on SQLite a transaction takes the write lock at its beginning."""

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[AsyncSession]:
        """Open a transaction that only reads."""
        with unavailable_as_store_error():
            async with AsyncSession(self.engine, expire_on_commit=False) as transaction:
                yield transaction

    @asynccontextmanager
    async def writing(self) -> AsyncIterator[AsyncSession]:
        """Open a transaction that is committed at the end of the block, or rolled back on an error."""
        with unavailable_as_store_error():
            async with (
                AsyncSession(self.writer, expire_on_commit=False) as transaction,
                transaction.begin(),
            ):
                yield transaction

    async def aclose(self) -> None:
        """Close all connections."""
        await self.engine.dispose()


def create_engine(url: str, statement_timeout_seconds: float | None) -> AsyncEngine:
    """Return an engine for `sqlite+aiosqlite:///FILE` or `postgresql+asyncpg://...`; connects to nothing yet."""
    parsed = parse_url(url)
    if parsed.get_backend_name() == "sqlite":
        return _create_sqlite_engine(parsed)
    return create_async_engine(
        parsed,
        pool_size=POOL_SIZE,
        max_overflow=POOL_SIZE,
        pool_timeout=TIMEOUT_SECONDS,
        pool_pre_ping=True,
        hide_parameters=True,
        connect_args={
            "timeout": TIMEOUT_SECONDS,
            "command_timeout": statement_timeout_seconds,
            "server_settings": {"application_name": "sluice"},
        },
    )


def parse_url(url: str) -> URL:
    """Return the parsed database URL, or refuse it without repeating it: it may carry a password."""
    try:
        parsed = make_url(url)
        parsed.get_dialect()
    except (ArgumentError, NoSuchModuleError, ValueError):
        parsed = None
    if parsed is None or parsed.drivername not in ("sqlite+aiosqlite", "postgresql+asyncpg"):
        raise InvalidParameterError(
            "The database URL must have the form sqlite+aiosqlite:///FILE or "
            "postgresql+asyncpg://USER:PASSWORD@HOST/NAME.",
            param="database_url",
        )
    return parsed


def _create_sqlite_engine(url: URL) -> AsyncEngine:
    engine = create_async_engine(
        url,
        pool_size=POOL_SIZE,
        pool_timeout=TIMEOUT_SECONDS,
        hide_parameters=True,
        connect_args={"timeout": TIMEOUT_SECONDS},
    )
    event.listen(engine.sync_engine, "connect", _prepare_sqlite_connection)
    event.listen(engine.sync_engine, "begin", _begin_sqlite_transaction)
    return engine


def _prepare_sqlite_connection(connection: Any, _record: object) -> None:
    # The driver must not begin transactions of its own: it would begin them too late and too weak.
    connection.isolation_level = None
    cursor = connection.cursor()
    # Changing the mode waits for nobody. Whoever is in the way has a connection, too, and the mode is the
    # file's: it is changed by one of them, or by the next one.
    with suppress(sqlite3.OperationalError):
        cursor.execute("PRAGMA journal_mode = WAL")
    cursor.execute("PRAGMA synchronous = NORMAL")
    cursor.execute("PRAGMA foreign_keys = ON")
    cursor.close()


def _begin_sqlite_transaction(connection: Connection) -> None:
    # A transaction that reads first and writes later fails at once when another one wrote in between,
    # so a writing transaction takes the write lock at its beginning, where the busy timeout applies.
    connection.exec_driver_sql(connection.get_execution_options().get(_BEGIN, "BEGIN"))


@contextmanager
def unavailable_as_store_error() -> Iterator[None]:
    """Turn whatever says that the database cannot answer into the one error for it."""
    try:
        yield
    except (IntegrityError, ProgrammingError):
        raise
    except (DBAPIError, PoolTimeoutError, OSError, TimeoutError) as error:
        raise StoreUnavailableError(
            "The database cannot be reached at the moment.", retry_after_seconds=1.0
        ) from error
