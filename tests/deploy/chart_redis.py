"""The chart's Redis, started on this machine as its pod starts it."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from redis import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from tests.deploy.helm import Manifest, environment, named, pod_of
from tests.support.certificates import self_signed
from tests.support.processes import free_port, spawn, stop, wait_until
from tests.support.stack import REPOSITORY

HOST: Final = "sluice-redis"
"""Its name in the cluster."""


@dataclass(frozen=True, slots=True)
class ChartRedis:
    """A running server."""

    port: int
    passwords: dict[str, str]
    """Passwords by user."""
    certificate: Path | None
    """The CA certificate for clients; None without TLS."""

    def client(self, user: str) -> Redis:
        """Return a client that is authenticated as a user."""
        options: dict[str, Any] = {}
        if self.certificate is not None:
            options = {"ssl": True, "ssl_ca_certs": str(self.certificate)}
        return Redis(
            host="localhost",
            port=self.port,
            username=user,
            password=self.passwords[user],
            **options,
        )

    def on_this_machine(self, url: str) -> str:
        """Return the URL of a pod with this machine's address."""
        url = url.replace(f"@{HOST}:6379/", f"@localhost:{self.port}/")
        trust = quote(str(self.certificate), safe="/")
        return url.replace("/etc/sluice/redis/ca.crt", trust)


@contextmanager
def running_chart_redis(
    manifests: Sequence[Manifest], folder: Path, executable: str
) -> Iterator[ChartRedis]:
    """Run the command of the pod for the length of a block, with the pod's files and passwords."""
    (container,) = pod_of(manifests, "redis").containers
    port, certificate = free_port(), None
    files = {
        "/etc/redis/": folder / "files",
        "/data": folder / "data",
        "/etc/redis-tls/": folder / "tls",
    }
    for each in files.values():
        each.mkdir()
    for name, text in named(manifests, "ConfigMap", HOST)["data"].items():
        (folder / "files" / name).write_text(text)
    if "--tls-port" in container["args"]:
        self_signed("localhost", folder / "tls")
        certificate = folder / "tls" / "server.pem"
        for name in ("tls.crt", "tls.key"):
            (folder / "tls" / name).symlink_to(certificate)
    words = [*container["command"], *container["args"]]
    for path, here in files.items():
        words = [
            word.replace(path, f"{here}/" if path.endswith("/") else str(here)) for word in words
        ]
    variables = environment(container, manifests)
    process = spawn(
        *(word.replace("6379", str(port)) for word in words),
        *("--bind", "127.0.0.1", "--logfile", str(folder / "redis.log")),
        env={
            # The process that ties tests' servers to them must be found.
            "PYTHONPATH": str(REPOSITORY),
            "PATH": f"{Path(executable).parent}:{os.environ['PATH']}",
            "TMPDIR": str(folder),
            **variables,
        },
        cwd=REPOSITORY,
    )
    passwords = {"default": variables["REDISCLI_AUTH"]}
    for role in ("gateway", "worker", "jobs"):
        passwords[role] = variables[f"REDIS_{role.upper()}_PASSWORD"]
    server = ChartRedis(port, passwords, certificate)

    def answers() -> bool:
        assert process.poll() is None, (folder / "redis.log").read_text()
        with server.client("default") as client:
            try:
                return bool(client.ping())
            except RedisConnectionError:
                return False

    try:
        wait_until(answers, what="redis-server answering")
        yield server
    finally:
        stop(process)
