"""Snapshot transactions: several reads as of one moment."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from sqlalchemy.ext.asyncio import AsyncSession

from gateway.database.engine import Database


@asynccontextmanager
async def snapshot(database: Database) -> AsyncIterator[AsyncSession]:
    """Open a read transaction that sees nothing committed after its first query."""
    async with database.reading() as transaction:
        # A transaction of SQLite is always a snapshot.
        if database.engine.dialect.name == "postgresql":
            _ = await transaction.connection(
                execution_options={"isolation_level": "REPEATABLE READ"}
            )
        yield transaction
