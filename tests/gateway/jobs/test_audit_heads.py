"""Signed heads of the audit log are stored outside of the database despite failures."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from gateway.accounts.audit.log import AuditLog, HeadSigner, SignedHead
from gateway.jobs.audit_heads import HeadKeeper
from gateway.platform.database.engine import Database
from gateway.platform.settings import load_settings
from tests.support.patience import PATIENCE_SECONDS

KEY = "a key of thirty-two characters or more"

Append = Callable[[], Awaitable[None]]


@pytest.fixture
def change(database: Database) -> Append:
    """Add an entry."""

    async def append() -> None:
        async with database.writing() as transaction:
            await AuditLog(transaction).append("key.create", "x", actor="system")

    return append


def keeper(database: Database, sink: str) -> HeadKeeper:
    """Return the keeper that the settings select."""
    settings = load_settings(audit_key=KEY, audit_sink=sink)
    return HeadKeeper(settings, database)


async def test_each_head_is_added_to_the_file(
    database: Database, change: Append, tmp_path: Path
) -> None:
    file = tmp_path / "audit heads"
    heads = keeper(database, file.as_uri())
    await heads.run()
    assert not file.exists()
    await change()
    await heads.run()
    await heads.run()
    await change()
    await heads.run()
    kept = SignedHead.all_in(file.read_text())
    assert [head.sequence for head in kept] == [1, 3]
    assert all(HeadSigner([KEY]).is_genuine(head) for head in kept)
    assert file.stat().st_mode & 0o077 == 0
    # After a restart it stores the newest one again: it may not have been stored.
    await keeper(database, file.as_uri()).run()
    assert SignedHead.all_in(file.read_text()) == [*kept, kept[-1]]


async def test_failed_head_is_stored_later(
    database: Database, change: Append, tmp_path: Path
) -> None:
    folder = tmp_path / "not there yet"
    heads = keeper(database, (folder / "heads").as_uri())
    await change()
    with pytest.raises(OSError, match="not there yet"):
        await heads.run()
    folder.mkdir()
    await heads.run()
    assert [head.sequence for head in SignedHead.all_in((folder / "heads").read_text())] == [1]


async def test_head_is_logged_at_every_log_level(
    database: Database, change: Append, caplog: pytest.LogCaptureFixture
) -> None:
    # The level of the root logger, but not that of the handler that captures.
    caplog.set_level(logging.WARNING)
    caplog.handler.setLevel(logging.NOTSET)
    await change()
    await keeper(database, "log").run()
    [head] = SignedHead.all_in(caplog.text)
    assert HeadSigner([KEY]).is_genuine(head)


async def test_head_is_posted_to_the_url_and_a_refusal_is_a_failure(
    database: Database, change: Append
) -> None:
    statuses, bodies = [500, 200], list[bytes]()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split()[0])
        bodies.append(await reader.readexactly(length))
        writer.write(b"HTTP/1.1 %d X\r\ncontent-length: 0\r\n\r\n" % statuses.pop(0))
        writer.close()

    await change()
    async with (
        asyncio.timeout(PATIENCE_SECONDS),
        await asyncio.start_server(answer, "127.0.0.1", 0) as server,
    ):
        port = server.sockets[0].getsockname()[1]
        heads = keeper(database, f"http://127.0.0.1:{port}/heads")
        with pytest.raises(OSError, match="500"):
            await heads.run()
        await heads.run()
    assert bodies[0] == bodies[1]
    assert b'"object":"audit.head"' in bodies[0]
    assert b'"sequence":1' in bodies[0]


async def test_nothing_is_signed_without_a_key(
    database: Database, change: Append, tmp_path: Path
) -> None:
    await change()
    file = tmp_path / "heads"
    await HeadKeeper(load_settings(audit_sink=file.as_uri()), database).run()
    assert not file.exists()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"audit_key": "short"}, "at least 32 characters"),
        ({"audit_key": f"{KEY},short"}, "at least 32 characters"),
        ({"audit_sink": "ftp://example.com"}, "file:///PATH"),
        ({"audit_sink": "file:relative"}, "file:///PATH"),
        ({"audit_sink": "https://"}, "file:///PATH"),
    ],
)
def test_invalid_settings_are_refused(settings: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_settings(**settings)


def test_password_in_the_url_of_the_sink_is_not_shown() -> None:
    url = "https://user:a-password@example.com/heads"
    assert "a-password" not in repr(load_settings(audit_sink=url))
