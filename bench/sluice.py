"""Sluice deployment for benchmarks: Redis, gateways, one worker and a database, on loopback."""

import asyncio
import json
import os
import secrets
import subprocess
import sys
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from bench.processes import descendants
from bench.starting import (
    CHECKPOINT,
    MODEL,
    REPOSITORY,
    Server,
    StartError,
    free_port,
    start,
)
from bench.systems import ENGINE_GROUP, Deployment, Engine
from common.redis_url import redis_client
from gateway.accounts.keys.service import KeyService
from gateway.accounts.tenants.service import TenantService
from gateway.cli.launch.launch_plan import redis_server
from gateway.platform.changes import ChangeAnnouncer
from gateway.platform.database.engine import Database
from gateway.records.limits import LimitChanges

_REDIS_OPTIONS = (
    "--bind",
    "127.0.0.1",
    "--save",
    "",
    "--appendonly",
    "no",
    "--loglevel",
    "warning",
)
_PROGRAM = (sys.executable, "-m", "gateway.cli.main")
_READY_SECONDS = 60.0
_ENGINE_READY_SECONDS = 600.0


class Sluice:
    """A running deployment.

    Args:
        folder: Folder for its files.
        name: Name in reports.
        repository: Checkout whose code runs.
        database_url: Same format as SLUICE_DATABASE_URL; by default a SQLite file in `folder`.
        settings: Additional environment variables of all its processes.
    """

    name = "Sluice"

    def __init__(
        self,
        folder: Path,
        *,
        name: str = name,
        repository: Path = REPOSITORY,
        database_url: str | None = None,
        settings: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.name = name
        self._folder = folder
        self._steps = folder / "steps"
        self._repository = repository
        self.redis_port = port = free_port()
        self.database_url = database_url or f"sqlite+aiosqlite:///{folder}/sluice.db"
        self._environment = {
            "SLUICE_REDIS_URL": f"redis://127.0.0.1:{port}/0",
            "SLUICE_DATABASE_URL": self.database_url,
            "SLUICE_CACHE_SALT_SECRET": secrets.token_hex(16),
            **settings,
        }
        self._keys: dict[str, str] = {}
        self._gateways: list[tuple[str, Server]] = []
        self._operator_urls: list[str] = []
        self._workers: list[tuple[Server, str]] = []
        redis = [redis_server(), "--port", str(port), "--dir", str(folder)]
        self.redis = start("redis", [*redis, *_REDIS_OPTIONS], folder=folder, environment={})

    def open(self, deployment: Deployment, *, workers: int = 1) -> None:
        """Start everything except the gateways, and wait until the workers are ready."""
        self.command("db", "upgrade")
        self._workers += [self._launch_worker(deployment) for _ in range(workers)]
        for worker, url in self._workers:
            worker.wait_until_ready(f"{url}/readyz", seconds=_ENGINE_READY_SECONDS)

    def start_worker(self, deployment: Deployment) -> tuple[Server, str]:
        """Start another worker, which the caller stops. Return it and the base URL of /metrics."""
        worker, url = self._launch_worker(deployment)
        worker.wait_until_ready(f"{url}/readyz", seconds=_ENGINE_READY_SECONDS)
        return worker, url

    def _launch_worker(self, deployment: Deployment) -> tuple[Server, str]:
        port = free_port()
        options = {
            "engine": deployment.engine.value,
            "model-path": str(deployment.checkpoint),
            "model-name": MODEL,
            "max-sequences": str(deployment.max_sequences),
            "context-window": str(deployment.context_window),
            "scripted-step-seconds": str(deployment.step_seconds),
            "health-port": str(port),
        }
        if deployment.engine_arguments:
            options["engine-arguments"] = deployment.engine_arguments
        if deployment.engine is Engine.SCRIPTED and not deployment.gathers:
            # Send every token by itself, to measure the cost of a single token.
            options["gather-seconds"] = "0"
        arguments = [text for name, value in options.items() for text in (f"--{name}", value)]
        program = ["bench.timed_worker", str(self._steps)] if deployment.times_steps else ["worker"]
        worker = self._start("worker", [sys.executable, "-m", *program, *arguments])
        return worker, f"http://127.0.0.1:{port}"

    def close(self) -> None:
        """Stop everything, Redis last, because the others use it during shutdown."""
        for _, gateway in self._gateways:
            gateway.stop()
        for worker, _ in self._workers:
            worker.stop()
        self.redis.stop()

    def urls(self, number: int) -> list[str]:
        """Return base URLs of `number` gateways; starts missing ones."""
        while len(self._gateways) < number:
            self._gateways.append(self._start_gateway(len(self._gateways) + 1))
        return [url for url, _ in self._gateways[:number]]

    def metrics_urls(self) -> list[str]:
        """Return base URLs of /metrics for the workers and one gateway."""
        self.urls(1)
        return [*(url for _, url in self._workers), self._operator_urls[0]]

    def key(
        self,
        tenant: str,
        *,
        weight: float = 1.0,
        limits: LimitChanges = MappingProxyType({}),
    ) -> str:
        """Return an API key of a tenant, created on first use with a weight and limits."""
        if tenant not in self._keys:
            self._keys[tenant] = asyncio.run(self._create_key(tenant, weight, limits))
        return self._keys[tenant]

    def step_ends(self) -> Sequence[float]:
        """Return when the steps of a worker ended (`Deployment.times_steps`)."""
        return array("d", self._steps.read_bytes())

    def groups(self, front_doors: int) -> dict[str, list[int]]:
        """Return the process ids of each part, without gateways beyond `front_doors`."""
        workers = [worker.pid for worker, _ in self._workers]
        groups = {
            "gateway": [gateway.pid for _, gateway in self._gateways[:front_doors]],
            "worker front": workers,
            "redis": [self.redis.pid],
        }
        engine = [pid for worker in workers for pid in descendants(worker)]
        return groups | ({ENGINE_GROUP: engine} if engine else {})

    def command(self, *arguments: str) -> str:
        """Run `sluice` with arguments and return its output. Raises StartError."""
        done = subprocess.run(
            [*_PROGRAM, *arguments],
            cwd=self._repository,
            env={**os.environ, **self._environment},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise StartError(f"`sluice {' '.join(arguments)}` failed: {done.stderr.strip()}")
        return done.stdout

    def create(self, *arguments: str) -> Any:
        """Run a command that creates something and return its parsed JSON output."""
        return json.loads(self.command(*arguments, "--json"))

    def start_command(self, *arguments: str) -> Server:
        """Start `sluice` with arguments as a part that runs until the caller stops it."""
        return self._start(arguments[0], [*_PROGRAM, *arguments])

    def start_scripted_workers(self, models: Sequence[str], step_seconds: float) -> Server:
        """Start a worker of each model in one process, which the caller stops."""
        settings = {
            "SLUICE_ENGINE": Engine.SCRIPTED.value,
            "SLUICE_MODEL_PATH": str(CHECKPOINT),
            "SLUICE_SCRIPTED_STEP_SECONDS": str(step_seconds),
        }
        command = [sys.executable, "-m", "bench.scripted_workers", *models]
        return self._start("workers", command, settings)

    def _start_gateway(self, number: int) -> tuple[str, Server]:
        port, operator_port = free_port(), free_port()
        url = f"http://127.0.0.1:{port}"
        self._operator_urls.append(f"http://127.0.0.1:{operator_port}")
        command = [*_PROGRAM, "gateway", "--port", str(port)]
        # An environment variable, because an earlier checkout may lack the option.
        operators = {"SLUICE_OPERATOR_PORT": str(operator_port)}
        gateway = self._start(f"gateway {number}", command, operators)
        gateway.wait_until_ready(f"{url}/readyz", seconds=_READY_SECONDS)
        return url, gateway

    def _start(
        self, name: str, command: list[str], environment: Mapping[str, str] = MappingProxyType({})
    ) -> Server:
        return start(
            name,
            command,
            folder=self._folder,
            environment={**self._environment, **environment},
            repository=self._repository,
        )

    async def _create_key(self, tenant: str, weight: float, limits: LimitChanges) -> str:
        database = Database(self.database_url)
        redis = redis_client(self._environment["SLUICE_REDIS_URL"])
        announcer = ChangeAnnouncer(redis)
        try:
            tenants = TenantService(database, announcer)
            await tenants.create(tenant, tenant_id=tenant, weight=weight, limits=limits)
            created = await KeyService(database, announcer).create(tenant, name="bench")
            key: str = created.key.reveal()
            return key
        finally:
            await redis.aclose()
            await database.aclose()


@contextmanager
def running_sluice(
    deployment: Deployment,
    folder: Path,
    *,
    name: str = Sluice.name,
    repository: Path = REPOSITORY,
    database_url: str | None = None,
    settings: Mapping[str, str] = MappingProxyType({}),
    workers: int = 1,
) -> Iterator[Sluice]:
    """Run a deployment within a block."""
    sluice = Sluice(
        folder, name=name, repository=repository, database_url=database_url, settings=settings
    )
    try:
        sluice.open(deployment, workers=workers)
        yield sluice
    finally:
        sluice.close()
