"""A real Redis Cluster of several masters and replicas on loopback."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Literal

from redis import Redis
from redis.crc import key_slot
from redis.exceptions import ResponseError

from tests.support.processes import wait_until
from tests.support.redis_server import (
    BUNDLED,
    CLUSTER_BUS_OFFSET,
    HASH_SLOTS,
    SYSTEM,
    Encryption,
    RedisServer,
    free_cluster_port,
)

NODE_TIMEOUT_MS = 2_000
"""After which a master that does not respond is replaced."""
_OPTIONS = (
    *("--cluster-node-timeout", str(NODE_TIMEOUT_MS), "--repl-diskless-sync-delay", "0"),
    *("--cluster-require-full-coverage", "no"),
)
_BY_HOSTNAME = ("--cluster-preferred-endpoint-type", "hostname")
_ENCRYPTED = (
    *("--tls-cluster", "yes", "--tls-replication", "yes"),
    *("--cluster-announce-hostname", "localhost", *_BY_HOSTNAME),
)
_MOVED_AT_ONCE = 64


class RedisClusterServers:
    """Masters with one replica each.

    Masters and replicas have the numbers of their first roles, `masters[0]` with `replicas[0]`.

    Args:
        masters: their number.
        executable: BUNDLED or SYSTEM.
        certificate: file of a key and its certificate for `localhost`. Clients, and servers among
            each other, then use TLS; only the tests' commands do not. Needs SYSTEM.
        announced: address at which clients reach the servers; they reach each other at 127.0.0.1.
            Needs SYSTEM.
        append: when they flush their append-only files; without one, each start begins empty.
    """

    def __init__(
        self,
        *,
        masters: int = 3,
        executable: str = SYSTEM or BUNDLED,
        certificate: Path | None = None,
        announced: str = "",
        append: Literal["always", "everysec"] | None = None,
    ) -> None:
        self._executable = executable
        self._certificate = certificate
        self._announced = announced
        self._append: Literal["always", "everysec"] | None = append
        self._encrypted_ports: dict[int, int] = {}
        bounds = [HASH_SLOTS * number // masters for number in range(masters + 1)]
        self.masters = [self._server(range(first, end)) for first, end in pairwise(bounds)]
        self.replicas = [self._server(range(0)) for _ in self.masters]

    @property
    def servers(self) -> list[RedisServer]:
        """All of them."""
        return [*self.masters, *self.replicas]

    @property
    def url(self) -> str:
        """The URL that names the first masters."""
        hosts = ",".join(f"{self.host}:{self.port(server)}" for server in self.masters)
        if self._certificate is None:
            return f"redis://{hosts}?cluster=true"
        return f"rediss://{hosts}?cluster=true&ssl_ca_certs={self._certificate}"

    @property
    def host(self) -> str:
        """The name or address that servers announce."""
        return "127.0.0.1" if self._certificate is None else "localhost"

    def port(self, server: RedisServer) -> int:
        """The port for clients and for other servers."""
        return self._encrypted_ports.get(server.port, server.port)

    def start(self) -> None:
        """Start all servers and wait until every replica is connected."""
        for server in self.servers:
            server.start()
        self._meet(self.servers)
        for master, replica in zip(self.masters, self.replicas, strict=True):
            self._replicate(replica, master)

    def add(self) -> RedisServer:
        """Start another master, which has no slots yet."""
        server = self._server(range(0))
        server.start()
        self.masters.append(server)
        self._meet([server, self.masters[0]])
        return server

    def remove(self, server: RedisServer, *, heir: RedisServer) -> None:
        """Move the slots of a master without replicas to another one, and stop it."""
        client = _client(server)
        own = client.execute_command("CLUSTER", "MYID")
        self.move(_slots_of(client), to=heir)
        self.masters.remove(server)
        for each in self.servers:
            each.command(f"CLUSTER FORGET {own.decode()}")
        # It may have become a replica, which ignores SIGTERM until it has an append-only file.
        server.kill()
        server.close()

    def used_slots(self, server: RedisServer) -> dict[int, bytes]:
        """Return the slots of a server that have keys, each with one of them."""
        names: list[bytes] = _client(server).execute_command("KEYS", "*")
        return {key_slot(name): name for name in names}

    def move(self, slots: Sequence[int], *, to: RedisServer) -> None:
        """Move slots with their keys, as `redis-cli --cluster reshard` does."""
        target = _client(to)
        target_id = target.execute_command("CLUSTER", "MYID")
        for slot in slots:
            if _has(to, slot):
                continue
            client = self.begin_move(slot, to=to)
            while keys := client.execute_command("CLUSTER", "GETKEYSINSLOT", slot, _MOVED_AT_ONCE):
                arguments = ("127.0.0.1", self.port(to), "", 0, 10_000, "KEYS", *keys)
                client.execute_command("MIGRATE", *arguments)
            target.execute_command("CLUSTER", "SETSLOT", slot, "NODE", target_id)
            try:
                client.execute_command("CLUSTER", "SETSLOT", slot, "NODE", target_id)
            except ResponseError:
                # Without its last slot, it became a replica of the target.
                if client.info("replication")["role"] == "master":
                    raise

    def begin_move(self, slot: int, *, to: RedisServer) -> "Redis":
        """Let a server ask for keys of a slot that it lacks at another one; return its client."""
        self.note_roles()
        # A StopIteration would never end the wait for another thread.
        source = next((each for each in self.masters if each is not to and _has(each, slot)), None)
        assert source is not None, f"no other master has slot {slot}"
        client, target = _client(source), _client(to)
        source_id, target_id = (e.execute_command("CLUSTER", "MYID") for e in (client, target))
        target.execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", source_id)
        client.execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", target_id)
        return client

    def cut_replication(self, number: int) -> None:
        """Let a master send no more writes to its replica, which is promoted all the same."""
        master = self.masters[number]
        master.command("ACL SETUSER default -psync -sync")
        master.command("CLIENT KILL TYPE replica")
        wait_until(lambda: not _is_connected(self.replicas[number]), what="the end of replication")

    def fail_over(self, number: int) -> None:
        """Kill a master and wait until its replica has its slots, as all other masters know."""
        killed = self.masters[number]
        killed.kill()
        self._promoted(number)
        wait_until(
            lambda: not any(_is_owner(self.port(killed), each) for each in self.masters),
            what="the masters' knowing of the promotion",
        )

    def replicate(self, number: int) -> None:
        """Wait until the replica of a master has all of its writes."""
        wait_until(lambda: _is_replicated(self.masters[number]), what="the replica's catching up")

    def switch_over(self, number: int) -> None:
        """Let a master and its replica change roles; no write is lost."""
        self.replicas[number].command("CLUSTER FAILOVER")
        self._promoted(number)
        self.settle(number)

    def _promoted(self, number: int) -> None:
        replica = self.replicas[number]
        wait_until(lambda: _is_master(replica) and replica.is_ready(), what="the promotion")
        self.masters[number], self.replicas[number] = replica, self.masters[number]

    def settle(self, number: int) -> None:
        """Wait until one of a master and its replica replicates the other, whichever it is, and
        both accept commands: not before two seconds have passed since a start or a long pause.
        """
        pair = self.masters[number], self.replicas[number]
        wait_until(lambda: any(map(_is_connected, pair)), what="the replica's connection")
        wait_until(lambda: all(each.is_ready() for each in pair), what="the servers serving again")
        self.note_roles()

    def note_roles(self) -> None:
        """Note failovers that have happened by themselves, as when the machine stood still."""
        for number, (master, replica) in enumerate(zip(self.masters, self.replicas, strict=False)):
            if not _is_master(master) and _is_master(replica):
                self.masters[number], self.replicas[number] = replica, master

    def restart_replica(self, number: int) -> None:
        """Start a killed server, and wait until it replicates the one that was promoted."""
        self.replicas[number].start()
        self.settle(number)

    def stop(self) -> None:
        """Stop all servers."""
        for server in self.servers:
            server.stop()

    def close(self) -> None:
        """Stop all servers and remove their files."""
        for server in self.servers:
            server.close()

    def _server(self, slots: range) -> RedisServer:
        if self._certificate is None:
            options: tuple[str, ...] = _OPTIONS
            if self._announced:
                options += ("--bind", "127.0.0.1", self._announced)
                options += ("--cluster-announce-hostname", self._announced, *_BY_HOSTNAME)
            return RedisServer(
                self._executable, cluster=True, slots=slots, append=self._append, options=options
            )
        encryption = Encryption(free_cluster_port(), self._certificate)
        options = (*_OPTIONS, *encryption.options, *_ENCRYPTED)
        options += ("--tls-ca-cert-file", str(self._certificate))
        server = RedisServer(self._executable, cluster=True, slots=slots, options=options)
        self._encrypted_ports[server.port] = encryption.port
        return server

    def _meet(self, servers: Sequence[RedisServer]) -> None:
        for server in servers[1:]:
            port = self.port(server)
            servers[0].command(f"CLUSTER MEET 127.0.0.1 {port} {port + CLUSTER_BUS_OFFSET}")
        for server in self.servers:
            knows = partial(_knows, server, len(self.servers))
            wait_until(knows, what="the servers knowing each other")

    def _replicate(self, replica: RedisServer, master: RedisServer) -> None:
        name = _client(master).execute_command("CLUSTER", "MYID").decode()
        replica.command(f"CLUSTER REPLICATE {name}")
        wait_until(lambda: _is_connected(replica), what="the replica's connection")


def _client(server: RedisServer) -> "Redis":
    return Redis(port=server.port, single_connection_client=True)


def _knows(server: RedisServer, number: int) -> bool:
    try:
        info = server.command("CLUSTER INFO")
    except OSError:  # Another fault has killed it, and will start it again.
        return False
    return server.is_ready() and b"cluster_known_nodes:%d" % number in info


def _has(server: RedisServer, slot: int) -> bool:
    return slot in _slots_of(_client(server))


def _slots_of(client: "Redis") -> list[int]:
    own = client.execute_command("CLUSTER", "MYID")
    return [
        slot
        for first, last, master, *_ in client.execute_command("CLUSTER", "SLOTS")
        if master[2] == own
        for slot in range(first, last + 1)
    ]


def _is_connected(server: RedisServer) -> bool:
    try:
        info = server.command("INFO replication")
    except OSError:  # Another fault has killed it, and will start it again.
        return False
    return b"role:slave" in info and b"master_link_status:up" in info


def _is_replicated(master: RedisServer) -> bool:
    """Return whether a replica has confirmed all writes of its master.

    WAIT would look at the writes of its own connection only.
    """
    info = master.command("INFO replication")
    offset = re.search(rb"master_repl_offset:(\d+)", info)
    return offset is not None and b",offset=%b," % offset[1] in info


def _is_owner(port: int, known_to: RedisServer) -> bool:
    """Return whether a server regards the one with this port as an owner of slots."""
    ranges = _client(known_to).execute_command("CLUSTER", "SLOTS")
    return any(master[1] == port for _, _, master, *_ in ranges)


def _is_master(server: RedisServer) -> bool:
    return b"role:master" in server.command("INFO replication")


@contextmanager
def running_cluster(
    *, masters: int = 3, certificate: Path | None = None
) -> Iterator[RedisClusterServers]:
    """Run a cluster for the length of a block."""
    cluster = RedisClusterServers(masters=masters, certificate=certificate)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.close()
