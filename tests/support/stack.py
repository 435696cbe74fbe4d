"""A running Sluice for tests: Redis, SQLite, gateways and workers as real processes on loopback."""

import asyncio
import fcntl
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.redis_url import redis_client
from gateway.accounts.keys.service import KeyService
from gateway.accounts.tenants.service import TenantService
from gateway.platform.changes import ChangeAnnouncer
from gateway.platform.database import schema
from gateway.platform.database.engine import Database
from gateway.records.errors import ConflictError
from tests.support.databases import create_sqlite
from tests.support.patience import PATIENCE_SECONDS, PROCESS_PATIENCE_SECONDS
from tests.support.processes import free_port, spawn, stop, wait_until
from tests.support.redis_cluster import RedisClusterServers
from tests.support.redis_server import BUNDLED, RedisServer
from tests.support.sentinels import WatchedRedis

REPOSITORY = Path(__file__).parents[2]
CHECKPOINT = REPOSITORY / "worker" / "demo_model" / "checkpoint"
MODEL = "sluice-tiny"
CACHE_SALT = "the salt of these tests"
ENGINE_START_SECONDS = 600
"""After which an engine counts as hung. On a busy machine one took 246 s to start."""


@dataclass
class Stack:
    """Processes of one deployment; `close` ends them all."""

    directory: Path
    redis: RedisServer | RedisClusterServers | WatchedRedis
    environment: dict[str, str]
    program: str = "tests.support.long_timeouts"
    """The module that runs as `sluice`."""
    worker_program: tuple[str, ...] = ("worker",)
    """The module that runs as a worker, and its arguments."""
    code: Path = REPOSITORY
    """The checkout whose code processes run that start from now on."""
    gateways: list[str] = field(default_factory=list)
    """Base URLs."""
    processes: dict[str, "subprocess.Popen[bytes]"] = field(default_factory=dict)
    _keys: dict[str, str] = field(default_factory=dict)

    @property
    def url(self) -> str:
        """Base URL of the first gateway."""
        return self.gateways[0]

    @property
    def operators(self) -> str:
        """Base URL of the first gateway for operators."""
        return self.operators_of(self.url)

    def operators_of(self, url: str) -> str:
        """Base URL of a gateway for operators."""
        return self.environment[f"operators of {url}"]

    def listener_of(self, path: str) -> str:
        """Base URL of the first gateway's listener for a path."""
        return self.operators if path.startswith(("/admin", "/metrics")) else self.url

    @property
    def database_url(self) -> str:
        """SQLAlchemy URL of the accounts."""
        return self.environment["SLUICE_DATABASE_URL"]

    @property
    def keys(self) -> list[str]:
        """Every key that was made."""
        return list(self._keys.values())

    def note_key(self, text: str) -> None:
        """Add a key that was made elsewhere."""
        self._keys[text] = text

    def key(self, tenant: str = "acme", **options: Any) -> str:
        """Return an API key of a tenant; the first call makes it."""
        name = f"{tenant} {options}"
        if name not in self._keys:
            # Another process of the tests may be making the same tenant.
            with locked(self.directory / "accounts.lock", fcntl.LOCK_EX):
                self._keys[name] = asyncio.run(self._create_key(tenant, options))
        return self._keys[name]

    async def _create_key(self, tenant: str, options: dict[str, Any]) -> str:
        weight = options.pop("weight", 1.0)
        database, redis = Database(self.database_url), redis_client(self.redis.url)
        announcer = ChangeAnnouncer(redis)
        try:
            tenants = TenantService(database, announcer)
            with suppress(ConflictError):
                await tenants.create(tenant, tenant_id=tenant, weight=weight)
            created = await KeyService(database, announcer).create(tenant, name="test", **options)
            return str(created.key.reveal())
        finally:
            await redis.aclose()
            await database.aclose()

    def start_gateway(self, name: str = "gateway", **environment: str) -> str:
        """Start a gateway on a free port and return its base URL once it is ready."""
        url = self.launch_gateway(name, environment, port=free_port())
        self.await_gateway(name, url)
        return url

    def await_gateway(self, name: str, url: str) -> None:
        """Wait until a launched gateway is ready."""
        wait_until(
            lambda: http_status(f"{url}/readyz") == 200 or self._has_ended(name),
            what=f"{name} being ready",
        )
        if self._has_ended(name):
            raise RuntimeError(f"{name} ended:\n{self.log(name)}")
        if url not in self.gateways:
            self.gateways.append(url)

    def launch_gateway(
        self,
        name: str,
        environment: Mapping[str, str] | None = None,
        *,
        port: int,
        operators: int | None = None,
    ) -> str:
        """Start a gateway without waiting for it, and return its future base URL.

        `operators` is the first process's port for operators, by default a free one.
        """
        environment = environment or {}
        operators = operators or free_port(count=int(environment.get("SLUICE_PROCESSES", "1")))
        url = f"http://127.0.0.1:{port}"
        ports = ("--port", str(port), "--operator-port", str(operators))
        self._start(name, [sys.executable, "-m", self.program, "gateway", *ports], environment)
        self.environment[f"operators of {url}"] = f"http://127.0.0.1:{operators}"
        return url

    def start_jobs(self, name: str = "jobs", **environment: str) -> None:
        """Start a process that runs background jobs."""
        self._start(name, [sys.executable, "-m", self.program, "jobs"], environment)

    def start_beat(self, name: str = "beat", **environment: str) -> None:
        """Start the process that schedules background jobs."""
        self._start(name, [sys.executable, "-m", self.program, "beat"], environment)

    def start_worker(self, name: str = "worker", **environment: str) -> None:
        """Start a worker of the tiny model and wait until it is ready."""
        self.launch_worker(name, environment)
        self.await_worker(name)

    def launch_worker(
        self, name: str = "worker", environment: Mapping[str, str] | None = None
    ) -> None:
        """Start a worker of the tiny model without waiting for it."""
        variables = {
            "SLUICE_MODEL_PATH": str(CHECKPOINT),
            "SLUICE_MODEL_NAME": MODEL,
            "SLUICE_TOOL_PARSER": "hermes",
            "SLUICE_REASONING_PARSER": "qwen3",
            "SLUICE_HEALTH_PORT": str(free_port()),
            **(environment or {}),
        }
        self._start(name, [sys.executable, "-m", *self.worker_program], variables)
        url = f"http://127.0.0.1:{variables['SLUICE_HEALTH_PORT']}"
        self.environment[f"url of {name}"] = url

    def launch_host(self, name: str, *options: str) -> None:
        """Start a host of several models without waiting for it."""
        redis = f"--redis-url={self.redis.url}"
        self._start(name, [sys.executable, "-m", "worker.hosting", redis, *options], {})

    def await_worker(self, name: str = "worker") -> None:
        """Wait until a launched worker is ready."""
        url = self.worker_url(name)
        wait_until(
            lambda: http_status(f"{url}/readyz") == 200 or self._has_ended(name),
            seconds=ENGINE_START_SECONDS,
            what=f"{name} being ready",
        )
        if self._has_ended(name):
            raise RuntimeError(f"{name} ended:\n{self.log(name)}")

    def worker_url(self, name: str = "worker") -> str:
        """Base URL of a worker's metrics."""
        return self.environment[f"url of {name}"]

    def log(self, name: str) -> str:
        """The output of a process so far."""
        return (self.directory / f"{name}.log").read_text(errors="replace")

    def stop(self, name: str) -> int:
        """End one process with SIGTERM and return its exit code."""
        return stop(self.processes.pop(name))

    def kill(self, name: str) -> None:
        """End one process with SIGKILL."""
        process = self.processes.pop(name)
        process.kill()
        process.wait(PATIENCE_SECONDS)

    def close(self) -> None:
        """End everything: gateways and workers first, since they deregister in Redis."""
        for process in self.processes.values():
            process.terminate()
        for process in self.processes.values():
            stop(process)
        self.redis.close()

    def _has_ended(self, name: str) -> bool:
        return self.processes[name].poll() is not None

    def _start(self, name: str, command: list[str], environment: Mapping[str, str]) -> None:
        if self.code != REPOSITORY:
            # An option, so that it is no fork of this code.
            command.insert(1, "-u")
        with (self.directory / f"{name}.log").open("ab") as log:
            self.processes[name] = spawn(
                *command,
                cwd=self.code,
                env={**os.environ, **self._variables(), **environment},
                stdout=log,
                stderr=subprocess.STDOUT,
                process_group=0,
            )

    def _variables(self) -> dict[str, str]:
        own = {name: text for name, text in self.environment.items() if name.startswith("SLUICE_")}
        return {"SLUICE_CACHE_SALT_SECRET": CACHE_SALT, **own}


def make_model(program: str, *arguments: object, log: Path) -> None:
    """Run a program that writes a model. Raise RuntimeError with its output if it fails."""
    command = [sys.executable, "-m", program, *map(str, arguments)]
    with log.open("wb") as output:
        made = spawn(*command, cwd=REPOSITORY, stdout=output, stderr=output)
    if made.wait(ENGINE_START_SECONDS):
        raise RuntimeError(f"{program} has made no model:\n{log.read_text()}")


@contextmanager
def running_stack(
    *,
    executable: str = BUNDLED,
    redis: RedisServer | RedisClusterServers | WatchedRedis | None = None,
    database_url: str | None = None,
) -> Iterator[Stack]:
    """Start Redis and upgrade a database, by default SQLite; the caller adds processes."""
    with tempfile.TemporaryDirectory(prefix="sluice-stack-") as folder:
        redis = redis or RedisServer(executable)
        redis.start()
        environment = {
            "SLUICE_REDIS_URL": redis.url,
            # Tests send more invalid credentials from one address than the product allows.
            "SLUICE_UNPAID_REQUESTS_PER_MINUTE": "0",
            "SLUICE_FAILED_LOGINS_PER_MINUTE": "0",
            "SLUICE_FILE_STORE": str(Path(folder) / "files"),
            "SLUICE_PROMPT_LOG_STORE": str(Path(folder) / "logs-{tenant}"),
        }
        stack = Stack(Path(folder), redis, environment)
        try:
            if database_url is None:
                database_url = create_sqlite(Path(folder) / "sluice.db")
            else:
                asyncio.run(schema.upgrade(database_url))
            stack.environment["SLUICE_DATABASE_URL"] = database_url
            yield stack
        finally:
            stack.close()


@contextmanager
def locked(path: Path, operation: int) -> Iterator[None]:
    """Hold a lock on a file; the kernel also releases it if the process is killed.

    `operation` is flock's.
    """
    with path.open("ab") as file:
        fcntl.flock(file, operation)
        yield


def http_status(url: str) -> int:
    """Return the status of a GET, or 0 without a connection or a response."""
    try:
        with urllib.request.urlopen(url, timeout=PATIENCE_SECONDS) as response:
            status: int = response.status
            return status
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def metric(url: str, name: str) -> float:
    """Return the sum of a metric's samples on `url`/metrics, 0 if there are none."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=PATIENCE_SECONDS) as response:
        lines = response.read().decode().splitlines()
    samples = [line for line in lines if line.startswith((f"{name} ", f"{name}{{"))]
    return sum(float(line.rpartition(" ")[2]) for line in samples)


def wait_for_metric(
    url: str, name: str, value: float, *, seconds: float = PROCESS_PATIENCE_SECONDS
) -> float:
    """Wait until a metric has a value; return the seconds that it took."""
    began = time.monotonic()
    wait_until(lambda: metric(url, name) == value, seconds=seconds, what=f"{name} being {value}")
    return time.monotonic() - began
