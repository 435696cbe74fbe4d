"""Connections to the database are closed with it."""

import asyncio

from sqlalchemy import event, text

from gateway.platform.database.engine import Database
from tests.support.kinds import every_database


@every_database
async def test_open_transaction_ends_before_its_connection_closes(database_url: str) -> None:
    database = Database(database_url)
    connections: list[str] = []
    for change in ("connect", "close"):
        event.listen(
            database.engine.sync_engine,
            change,
            lambda *_, change=change: connections.append(change),
        )
    begun, end = asyncio.Event(), asyncio.Event()

    async def read() -> None:
        async with database.reading() as transaction:
            await transaction.execute(text("SELECT 1"))
            begun.set()
            await end.wait()

    reading = asyncio.create_task(read())
    await begun.wait()
    closing = asyncio.create_task(database.aclose())
    # `aclose` begins.
    await asyncio.sleep(0)
    end.set()
    await asyncio.gather(reading, closing)
    assert connections == ["connect", "close"]
