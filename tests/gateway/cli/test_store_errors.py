"""Errors of Redis and the database name the store, its address and the cause."""

import asyncio
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import asyncpg
import pytest

from tests.gateway.cli.conftest import Sluice
from tests.support.cases import case
from tests.support.processes import free_port, wait_until
from tests.support.redis_server import RedisServer

PASSWORD = "hidden"


@contextmanager
def _listening(answer: bytes) -> Iterator[int]:
    """Accept connections on a port and send an answer to each, or nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        connections = []

        def accept() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:  # The server is closed.
                    return
                connections.append(connection)
                connection.sendall(answer)

        thread = Thread(target=accept, daemon=True)
        thread.start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
        thread.join()
        for connection in connections:
            connection.close()


@contextmanager
def _replica(server: RedisServer) -> Iterator[None]:
    server.command(f"REPLICAOF 127.0.0.1 {free_port()}")
    try:
        yield
    finally:
        server.command("REPLICAOF NO ONE")


@pytest.fixture
def limited(redis_server: RedisServer) -> Iterator[str]:
    """URL of a user that may only ping."""
    server = redis_server
    server.command(f"ACL SETUSER limited on >{PASSWORD} +ping +info ~*")
    yield f"redis://limited:{PASSWORD}@127.0.0.1:{server.port}/0"
    server.command("ACL DELUSER limited")


def _error(sluice: Sluice, *arguments: str) -> str:
    result = sluice(*arguments)
    assert (result.exit_code, result.stdout) == (1, ""), result.output
    [line] = result.stderr.splitlines()
    assert PASSWORD not in line
    return line


def test_cause_of_a_failure_of_redis(
    sluice: Sluice, redis_server: RedisServer, limited: str, frozen_redis_is_left: None
) -> None:
    missing = "rediss://127.0.0.1?ssl_ca_certs=/no/ca.pem"
    assert _error(sluice, "models", "list", "--redis-url", missing) == (
        "Error: SLUICE_REDIS_URL: ssl_ca_certs: the file /no/ca.pem cannot be read "
        "(No such file or directory)."
    )
    wrong, closed = limited.replace(PASSWORD, "hidden2"), free_port()
    with _listening(b"") as silent, _listening(b"-ERR\r\n") as plain:
        for url, cause in (
            (f"redis://u:{PASSWORD}@127.0.0.1:{closed}", f":{closed}: connection refused."),
            (f"redis://u:{PASSWORD}@no-such.invalid", ":6379: its name cannot be resolved."),
            (f"redis://127.0.0.1:{silent}", f"127.0.0.1:{silent}: no response in time."),
            (f"rediss://127.0.0.1:{plain}", f"127.0.0.1:{plain}: TLS failed ("),
            (wrong, f"127.0.0.1:{redis_server.port}: authentication failed."),
            (limited, f":{redis_server.port}: missing permission (this user has no permissions"),
        ):
            with case(url):
                line = _error(sluice, "models", "list", "--redis-url", url)
                assert line.startswith("Error: Redis at ")
                assert cause in line


@pytest.mark.usefixtures("upgraded")
def test_unannounced_change_names_the_cause(
    sluice: Sluice, redis_server: RedisServer, limited: str
) -> None:
    where = f"Error: Redis at 127.0.0.1:{redis_server.port}: "
    suspend = ("tenants", "suspend", "acme")
    denied = _error(sluice, *suspend, "--redis-url", limited)
    assert denied.startswith(f"{where}missing permission (this user has no permissions")
    assert "The change is saved, but gateways apply" in denied
    with _replica(redis_server):
        assert _error(sluice, *suspend).startswith(f"{where}it is a read-only replica. The change")
        grant = _error(sluice, "credits", "grant", "--tenant", "acme", "5")
        assert grant == f"{where}it is a read-only replica. Nothing was changed. Retry later."


def test_cause_of_a_failure_of_the_database(
    sluice: Sluice, tmp_path: Path, postgres_sockets: str, asked: Callable[..., Any]
) -> None:
    closed = free_port()
    server = f"{postgres_sockets}:5432"
    asked("CREATE ROLE limited LOGIN", f"CREATE ROLE guarded LOGIN PASSWORD '{PASSWORD}'")
    rules = Path(asked("SHOW hba_file"))
    before = rules.read_text()
    rules.write_text(f"local all guarded scram-sha-256\n{before}")
    asked("SELECT pg_reload_conf()")
    on_sockets = f"?host={postgres_sockets}"
    guarded = f"postgresql+asyncpg://guarded:hidden2@/postgres{on_sockets}"
    try:
        wait_until(
            lambda: "schema is" not in sluice("tenants", "list", "--database-url", guarded).stderr,
            what="the server requiring a password",
        )
        for url, cause in (
            (f"u:{PASSWORD}@127.0.0.1:{closed}/d", f"127.0.0.1:{closed}: connection refused."),
            (f"u:{PASSWORD}@no-such.invalid/d", ":5432: its name cannot be resolved."),
            (guarded.partition("//")[2], f"{server}: authentication failed."),
            (f"nobody@/postgres{on_sockets}", 'authentication failed (role "nobody" does not'),
            (f"postgres@/nothing{on_sockets}", f'{server}: database "nothing" does not exist.'),
            (f"limited@/postgres{on_sockets}", f"{server}: missing permission (permission denied"),
        ):
            with case(url):
                given = ("--database-url", f"postgresql+asyncpg://{url}")
                line = _error(sluice, "db", "upgrade", *given)
                assert line.startswith("Error: PostgreSQL at ")
                assert cause in line
    finally:
        rules.write_text(before)
        asked("SELECT pg_reload_conf()", "DROP ROLE limited", "DROP ROLE guarded")
    file = tmp_path / "data"
    file.write_text("no database" * 100)
    line = _error(sluice, "tenants", "list", "--database-url", f"sqlite+aiosqlite:///{file}")
    assert line == f"Error: The SQLite file {file}: file is not a database."


@pytest.fixture
def asked(postgres_sockets: str) -> Callable[..., Any]:
    """Run statements as PostgreSQL's superuser and return the value of the last one."""

    async def ask(*statements: str) -> Any:
        connection = await asyncpg.connect(
            user="postgres", database="postgres", host=postgres_sockets
        )
        try:
            return [await connection.fetchval(statement) for statement in statements][-1]
        finally:
            await connection.close()

    return lambda *statements: asyncio.run(ask(*statements))
