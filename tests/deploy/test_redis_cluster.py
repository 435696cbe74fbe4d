"""The servers of the profile `cluster`, started on this machine with their commands."""

import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest
from redis import Redis

from common.redis_url import redis_client
from tests.deploy.compose_file import FILE, FILLED_IN, interpolated, load, services
from tests.support.patience import PATIENCE_SECONDS
from tests.support.processes import spawn, stop, wait_until
from tests.support.redis_server import SYSTEM, free_cluster_port
from tests.support.stack import REPOSITORY

NAMES = [f"redis-{number}" for number in range(1, 7)]
CREATE = services()["redis-cluster"]
ROLES = ("gateway", "worker", "jobs")


@dataclass
class ComposeCluster:
    """The six servers. They announce the name `localhost`."""

    folder: Path
    ports: dict[str, int] = field(
        default_factory=lambda: {name: free_cluster_port() for name in NAMES}
    )
    running: "list[subprocess.Popen[bytes]]" = field(default_factory=list)

    def start(self, address: str) -> None:
        """Start all servers on an address, and run the command that connects them."""
        for name, port in self.ports.items():
            service = services()[name]
            assert service.options["hostname"] == name
            data = self.folder / name
            data.mkdir(exist_ok=True)
            *shell, script = service.options["command"]
            script = script.replace("/etc/redis/", f"{REPOSITORY}/ops/redis/")
            script = script.replace("/data", str(data)).replace("$(hostname)", "localhost")
            # Servers that are unknown at their addresses are soon noticed.
            script += f" --port {port} --bind {address} --cluster-node-timeout 1000"
            script += f" --logfile {data}/log"
            variables = self.environment(service.environment)
            self.running.append(spawn(*shell, script, env=variables, cwd=REPOSITORY))
        for port in self.ports.values():
            wait_until(partial(_answers, address, port), what="redis-server answering")
        shell, script, *names = CREATE.options["command"]
        assert names == NAMES
        script = script.replace("/etc/redis-cluster/", f"{REPOSITORY}/ops/redis-cluster/")
        done = subprocess.run(
            [shell, script, *(f"{address}:{port}" for port in self.ports.values())],
            env=self.environment(CREATE.environment),
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE_SECONDS,
        )
        assert done.returncode == 0, done.stdout + done.stderr

    def stop(self) -> None:
        """Stop all servers."""
        while self.running:
            stop(self.running.pop())

    def environment(self, variables: dict[str, str]) -> dict[str, str]:
        """Return a container's variables, with those that programs need here."""
        own = {"PATH": os.environ["PATH"], "PYTHONPATH": str(REPOSITORY)}
        return own | {"TMPDIR": str(self.folder)} | variables


def _answers(address: str, port: int) -> bool:
    try:
        return bool(_client(address, port, "default").ping())
    except ConnectionError:
        return False


def _client(address: str, port: int, user: str) -> Redis:
    name = "REDIS_PASSWORD" if user == "default" else f"REDIS_{user.upper()}_PASSWORD"
    password = FILLED_IN[name]
    return Redis(address, port, username=user, password=password, single_connection_client=True)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ComposeCluster]:
    if SYSTEM is None:
        pytest.skip("redis-server of the system (Debian's redis-server) is not installed")
    cluster = ComposeCluster(tmp_path_factory.mktemp("cluster"))
    try:
        cluster.start("127.0.0.1")
        yield cluster
    finally:
        cluster.stop()


async def test_each_role_can_use_every_server_of_the_compose_cluster(
    cluster: ComposeCluster,
) -> None:
    servers = ",".join(f"localhost:{port}" for port in cluster.ports.values())
    variables = FILLED_IN | {"REDIS_SERVERS": f"{servers}?cluster=true"}
    processes = interpolated(load(FILE), variables)["services"]
    for name in ("gateway", "worker"):
        async with redis_client(processes[name]["environment"]["SLUICE_REDIS_URL"]) as client:
            for tag in range(20):
                assert await client.set(f"{{m:{tag}}}:leases", name)
    for port in cluster.ports.values():
        for role in ROLES:
            slots = _client("127.0.0.1", port, role).execute_command("CLUSTER", "SLOTS")
            assert {master[0] for _, _, master, *_ in slots} == {b"localhost"}
        operator = _client("127.0.0.1", port, "default")
        wait_until(partial(_is_connected, operator), what="the replica")


def _is_connected(operator: Redis) -> bool:
    info = operator.info("replication")
    return bool(info.get("connected_slaves") or info.get("master_link_status") == "up")


def test_servers_find_each_other_at_new_addresses(cluster: ComposeCluster) -> None:
    """Containers get other addresses after a restart, which the servers' files do not have."""
    cluster.stop()
    cluster.start("127.0.0.2")
