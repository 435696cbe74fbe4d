"""Connections to the database are closed with it."""

import asyncio
import sqlite3
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event, text
from typing_extensions import override

from gateway.platform.database.engine import Database
from tests.support.kinds import every_database
from tests.support.patience import PATIENCE_SECONDS


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


async def test_connection_that_opens_for_a_cancelled_task_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, closed, connect = threading.Event(), [], sqlite3.connect

    class Connection(sqlite3.Connection):
        @override
        def close(self) -> None:
            closed.append(self)
            super().close()

    def open_slowly(*arguments: Any, **options: Any) -> sqlite3.Connection:
        opened.set()
        time.sleep(0.1)
        return connect(*arguments, factory=Connection, **options)

    monkeypatch.setattr(sqlite3, "connect", open_slowly)
    database = Database(f"sqlite+aiosqlite:///{tmp_path}/x.db")

    async def write() -> None:
        async with database.writing() as transaction:
            await transaction.execute(text("SELECT 1"))

    task = asyncio.create_task(write())
    await asyncio.to_thread(opened.wait, PATIENCE_SECONDS)
    for _ in range(2):
        task.cancel()
        await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await task
    await database.aclose()
    assert len(closed) == 1
