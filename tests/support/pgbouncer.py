"""Debian's PgBouncer in front of a PostgreSQL server: transaction mode, with TLS to its clients."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.certificates import self_signed
from tests.support.processes import free_port, is_free, spawn, stop, wait_until

PGBOUNCER = shutil.which("pgbouncer") or shutil.which("pgbouncer", path="/usr/sbin")
_SETTINGS = """
[databases]
* = host={sockets} user=postgres
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
unix_socket_dir =
auth_type = any
pool_mode = transaction
default_pool_size = 2
server_idle_timeout = 1
client_tls_sslmode = allow
client_tls_key_file = {folder}/server.pem
client_tls_cert_file = {folder}/server.pem
{user}
"""


class Pooler(NamedTuple):
    """A running PgBouncer, whose pools have two connections to the server."""

    port: int
    authority: Path
    """The certificate that its clients verify; its name is `localhost`."""


@contextmanager
def running_pgbouncer(sockets: str) -> Iterator[Pooler]:
    """Run PgBouncer for the server with these sockets for the length of a block."""
    if PGBOUNCER is None:
        pytest.skip("PgBouncer (Debian's pgbouncer) is not installed")
    # It refuses to run as root, and its own user must be able to read the files.
    folder, port = Path(tempfile.mkdtemp(prefix="sluice-pgbouncer-")), free_port()
    folder.chmod(0o755)
    self_signed("localhost", folder)
    user = "user = pgserver" if os.getuid() == 0 else ""
    settings = folder / "pgbouncer.ini"
    settings.write_text(_SETTINGS.format(sockets=sockets, port=port, folder=folder, user=user))
    log = folder / "log"
    with log.open("wb") as output:
        process = spawn(PGBOUNCER, str(settings), stdout=output, stderr=subprocess.STDOUT)
    try:
        wait_until(lambda: not is_free(port), what=f"PgBouncer being ready ({log})")
        yield Pooler(port, folder / "server.pem")
    finally:
        stop(process)
        with suppress(OSError):
            shutil.rmtree(folder)
