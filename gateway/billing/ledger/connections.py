"""Redis and the database, opened for work on the ledger."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from redis.asyncio import Redis

from gateway.platform.database.engine import Database
from gateway.platform.redis_client import connect
from gateway.platform.settings import Settings

MAX_CONNECTIONS: Final = 32
"""Connections to Redis."""
SQL_CONNECTIONS: Final = 24
"""More than there are background jobs, so that none waits for the statements of others."""
STATEMENT_SECONDS: Final = 60.0
"""Limit of one statement: rollups of a busy hour take longer than a request may wait."""


@asynccontextmanager
async def open_ledger(settings: Settings) -> AsyncIterator[tuple[Redis, Database]]:
    """Open both, and close them at the end of the block."""
    database = Database(
        settings.database_url.get_secret_value(),
        statement_timeout_seconds=STATEMENT_SECONDS,
        most_connections=SQL_CONNECTIONS,
    )
    redis = connect(settings.redis_url, max_connections=MAX_CONNECTIONS)
    try:
        yield redis, database
    finally:
        await redis.aclose()
        await database.aclose()
