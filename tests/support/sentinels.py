"""A Redis that fails over: a master, a replica, and three sentinels that watch them."""

import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final
from urllib.parse import quote

from tests.support.processes import free_port, spawn, stop, wait_until
from tests.support.redis_server import BUNDLED, RedisServer

SERVICE: Final = "mymaster"
SENTINELS: Final = 3
QUORUM: Final = 2
DOWN_AFTER_MS: Final = 1000
"""Silence after which a sentinel considers a server dead, while a test has one fail."""
PATIENT_MS: Final = 600_000
"""The same otherwise: on a busy machine a server may send nothing for seconds."""
FAILOVER_TIMEOUT_MS: Final = 3000


class WatchedRedis:
    """Two servers, of which sentinels make one the master; same interface as RedisServer for tests.

    Args:
        password: of the servers, and of the sentinels; none if empty.
    """

    def __init__(self, executable: str = BUNDLED, *, password: str = "") -> None:
        self._password = password
        self._options = ("--requirepass", password, "--masterauth", password) if password else ()
        self._servers = [RedisServer(executable, options=self._options) for _ in range(2)]
        self._executable = executable
        self._ports = [free_port() for _ in range(SENTINELS)]
        self._folder = tempfile.TemporaryDirectory(prefix="sluice-sentinels-")
        self._sentinels: list[subprocess.Popen[bytes]] = []

    @property
    def url(self) -> str:
        """The value of SLUICE_REDIS_URL."""
        hosts = ",".join(f"127.0.0.1:{port}" for port in self._ports)
        if not self._password:
            return f"redis+sentinel://{hosts}/{SERVICE}/0"
        secret = quote(self._password, safe="")
        return f"redis+sentinel://:{secret}@{hosts}/{SERVICE}/0?sentinel_password={secret}"

    @property
    def master(self) -> RedisServer:
        """The server that most sentinels consider the master."""
        ports = [self._master_port(port) for port in self._ports]
        [found] = [each for each in self._servers if ports.count(each.port) >= QUORUM]
        return found

    @property
    def replica(self) -> RedisServer:
        """The other one."""
        master = self.master
        [found] = [each for each in self._servers if each is not master]
        return found

    def start(self) -> None:
        """Start everything, and wait until they have registered each other and the replica."""
        master, replica = self._servers
        master.start()
        replica.start()
        self._ask(replica.port, f"REPLICAOF 127.0.0.1 {master.port}")
        for port in self._ports:
            self._sentinels.append(self._start_sentinel(port, master.port))
        self.await_replica()

    def await_replica(self) -> None:
        """Wait until the sentinels have registered the replica, and it has all data."""
        wait_until(self._is_watched, what="the sentinels registering the replica")
        wait_until(
            lambda: b"master_link_status:up" in self._ask(self.replica.port, "INFO replication"),
            what="the replica having all data",
        )

    def await_failover(self, old: RedisServer) -> None:
        """Wait until the sentinels replace `old` with another writable master."""
        self._be_patient_for(DOWN_AFTER_MS)

        def is_over() -> bool:
            ports = [self._master_port(port) for port in self._ports]
            [new] = [each for each in self._servers if each is not old]
            return ports.count(new.port) == SENTINELS and b"role:master" in self._ask(
                new.port, "INFO replication"
            )

        wait_until(is_over, what="the failover")
        self._be_patient_for(PATIENT_MS)

    def _be_patient_for(self, milliseconds: int) -> None:
        for port in self._ports:
            self._ask(port, f"SENTINEL SET {SERVICE} down-after-milliseconds {milliseconds}")

    def stop_sentinel(self, number: int) -> None:
        """End one of the sentinels."""
        stop(self._sentinels[number])

    def stop(self) -> None:
        """Stop everything; a following `start` begins empty."""
        for sentinel in self._sentinels:
            stop(sentinel)
        self._sentinels.clear()
        for server in self._servers:
            server.stop()

    def close(self) -> None:
        """Stop everything and remove its files."""
        self.stop()
        for server in self._servers:
            server.close()
        self._folder.cleanup()

    def _start_sentinel(self, port: int, master_port: int) -> "subprocess.Popen[bytes]":
        lines = [
            f"port {port}",
            "bind 127.0.0.1",
            f"dir {self._folder.name}",
            f"logfile {port}.log",
            f"sentinel monitor {SERVICE} 127.0.0.1 {master_port} {QUORUM}",
            f"sentinel down-after-milliseconds {SERVICE} {PATIENT_MS}",
            f"sentinel failover-timeout {SERVICE} {FAILOVER_TIMEOUT_MS}",
        ]
        if self._password:
            lines += [
                f"requirepass {self._password}",
                f"sentinel auth-pass {SERVICE} {self._password}",
            ]
        configuration = Path(self._folder.name) / f"{port}.conf"
        configuration.write_text("\n".join(lines) + "\n")
        return spawn(
            self._executable,
            str(configuration),
            "--sentinel",
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def _is_watched(self) -> bool:
        for port in self._ports:
            # Names and values, each after a line with its length.
            reported = self._ask(port, f"SENTINEL master {SERVICE}").split(b"\r\n")
            found = dict(zip(reported[2::4], reported[4::4], strict=False))
            if found.get(b"num-slaves") != b"1":
                return False
            if found.get(b"num-other-sentinels") != b"%d" % (SENTINELS - 1):
                return False
        return True

    def _master_port(self, sentinel: int) -> int:
        reported = self._ask(sentinel, f"SENTINEL get-master-addr-by-name {SERVICE}").split()
        return int(reported[-1]) if reported else 0

    def _ask(self, port: int, line: str) -> bytes:
        """Send a command to a server or sentinel; return its reply, empty if unreachable."""
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=2) as connection:
                if self._password:
                    connection.sendall(b"AUTH %s\r\n" % self._password.encode())
                    connection.recv(64)
                connection.sendall(line.encode() + b"\r\n")
                return connection.recv(65536)
        except OSError:
            return b""


@contextmanager
def running_watched_redis(
    executable: str = BUNDLED, *, password: str = ""
) -> Iterator[WatchedRedis]:
    """Run servers and sentinels for the length of a block."""
    watched = WatchedRedis(executable, password=password)
    try:
        watched.start()
        yield watched
    finally:
        watched.close()
