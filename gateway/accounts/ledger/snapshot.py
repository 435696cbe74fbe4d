"""Reading several things as of one moment."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from sqlalchemy.ext.asyncio import AsyncSession

from gateway.accounts.database import Database


@asynccontextmanager
async def snapshot(database: Database) -> AsyncIterator[AsyncSession]:
    """Open a transaction that reads, and sees nothing of what is committed after its first query."""
    async with database.reading() as transaction:
        # A transaction of SQLite is a snapshot anyway.
        if database.engine.dialect.name == "postgresql":
            _ = await transaction.connection(
                execution_options={"isolation_level": "REPEATABLE READ"}
            )
        yield transaction
