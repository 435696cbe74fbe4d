"""Processes that can be killed, stopped, restarted and, through proxies, cut off from Redis."""

import asyncio
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from tests.failures.chaos import plants, program
from tests.failures.chaos.clock_library import clock_variables
from tests.failures.chaos.proxy import Links
from tests.support.postgres_server import PostgresServer
from tests.support.processes import free_port
from tests.support.redis_cluster import RedisClusterServers
from tests.support.redis_server import RedisServer
from tests.support.stack import CHECKPOINT, MODEL, Stack, http_status, metric

START_SECONDS = 90.0
LOOK_SECONDS = 0.1
DRAIN_SECONDS = 90
STOP_SECONDS = DRAIN_SECONDS + 30.0
STATE_SECONDS = 60.0

CLOCKED = ("gateway", "worker")
"""Roles that may have a process whose clock can be set."""
WORKER_LEASE_SECONDS = 2.0
"""Of workers with short leases."""
STEP_SECONDS = 0.02
MAX_SEQUENCES = 16
"""Of one worker: so few that a burst of one tenant leaves no room for the others."""
COMPLETION_TOKENS = 200
"""The scripted engine ends a text here, unless the request ignores it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The number of processes of each kind."""

    gateways: int = 2
    workers: int = 3


@dataclass(slots=True)
class Member:
    """One process of the deployment. Its name stays the same over restarts."""

    name: str
    role: str
    arguments: list[str]
    environment: dict[str, str]
    links: Links
    url: str = ""
    """Base URL of its health endpoints; empty if it has none."""
    metrics_url: str = ""
    """Base URL of its metrics; empty if it has none."""
    process: "subprocess.Popen[bytes] | None" = None
    is_expected_to_end: bool = False
    is_busy: bool = False
    """Whether a fault affects it now."""
    was_ready: bool = False
    """Whether it has been ready since its start."""
    starts: int = 0
    started_at: float = 0.0

    @property
    def pid(self) -> int:
        """Process id; raises AssertionError if it is not running."""
        assert self.process is not None
        return self.process.pid


@dataclass
class Deployment:
    """All processes. Faults refer to them by name."""

    stack: Stack
    redis: RedisServer
    """The only Redis, or Celery's beside a cluster."""
    cluster: RedisClusterServers | None
    postgres: PostgresServer | None
    clocked: Collection[str] = CLOCKED
    """Roles whose last process has a clock that can be set."""
    members: dict[str, Member] = field(default_factory=dict)
    unexpected_ends: list[str] = field(default_factory=list)
    """Processes that exited without a signal from the suite after they had been ready."""
    is_closing: bool = False

    def named(self, role: str) -> list[Member]:
        """Return the members of a role."""
        return [member for member in self.members.values() if member.role == role]

    @property
    def gateway_urls(self) -> dict[str, str]:
        """Base URLs by name."""
        return {member.name: member.url for member in self.named("gateway")}

    async def add(self, role: str, number: int | None, environment: Mapping[str, str]) -> Member:
        """Add a process with its own proxies to Redis, and start it."""
        name = role if number is None else f"{role}-{number}"
        links = Links(len(self.members))
        arguments, url, metrics_url = [], "", ""
        variables = {**await self._connect(links), **environment}
        if role == "gateway":
            port, operators = free_port(), free_port()
            arguments = ["--port", str(port), "--operator-port", str(operators)]
            url, metrics_url = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{operators}"
            # A response that a drain cuts off and a client resumes is charged in two parts, each
            # with the prompt. On a busy machine, 30 seconds do not suffice.
            variables["SLUICE_DRAIN_TIMEOUT"] = str(DRAIN_SECONDS)
        elif role == "worker":
            port = free_port()
            url = metrics_url = f"http://127.0.0.1:{port}"
            variables |= _worker_variables(port)
        variables[program.STATE_FILE] = str(self._state_file(name))
        member = self.members[name] = Member(
            name, role, arguments, variables, links, url, metrics_url
        )
        self.start(member)
        return member

    async def _connect(self, links: Links) -> dict[str, str]:
        """Open the proxies of a process; return its variables."""
        url = await links.open(self.redis.port)
        if self.cluster is None:
            return {"SLUICE_REDIS_URL": url}
        for server in self.cluster.servers:
            await links.open(server.port)
        seeds = ",".join(f"{links.address}:{server.port}" for server in self.cluster.masters)
        return {
            "SLUICE_REDIS_URL": f"redis://{seeds}?cluster=true",
            "SLUICE_CELERY_BROKER_URL": url,
        }

    def start(self, member: Member) -> None:
        """Start a process that is not running."""
        member.is_expected_to_end, member.was_ready = False, False
        member.starts += 1
        member.started_at = time.monotonic()
        # Variables of the member override those of the deployment.
        self.stack._start(
            member.name,
            [sys.executable, "-m", "tests.failures.chaos.program", member.role, *member.arguments],
            member.environment,
        )
        member.process = self.stack.processes[member.name]

    async def ready(self, member: Member) -> None:
        """Wait until a process serves. Raises TimeoutError with the end of its log."""
        # A stall of the machine counts as one look, however long it lasts.
        for _ in range(round(START_SECONDS / LOOK_SECONDS)):
            if await self.is_ready(member):
                member.was_ready = True
                return
            await asyncio.sleep(LOOK_SECONDS)
        log = self.stack.log(member.name)[-2_000:]
        raise TimeoutError(f"{member.name} was not ready in {START_SECONDS} s:\n{log}")

    async def is_ready(self, member: Member) -> bool:
        """Whether a process serves now. Background jobs do once they connect to Redis."""
        if not self.is_running(member):
            return False
        if not member.url:
            return member.links.is_used
        return await asyncio.to_thread(http_status, f"{member.url}/readyz") == 200

    def is_running(self, member: Member) -> bool:
        """Whether its process is running."""
        return member.process is not None and member.process.poll() is None

    async def kill(self, member: Member) -> None:
        """Kill a process and its children with SIGKILL."""
        member.is_expected_to_end = True
        if self.is_running(member):
            os.killpg(member.pid, signal.SIGKILL)
        await self._gone(member)

    async def terminate(self, member: Member) -> int:
        """Send SIGTERM to a process; return its exit code. Kill one that does not exit."""
        member.is_expected_to_end = True
        if self.is_running(member):
            os.kill(member.pid, signal.SIGTERM)
        try:
            return await asyncio.wait_for(self._gone(member), STOP_SECONDS)
        except TimeoutError:
            self.unexpected_ends.append(f"{member.name} did not end after SIGTERM")
            await self.kill(member)
            return -signal.SIGKILL

    async def _gone(self, member: Member) -> int:
        assert member.process is not None
        while (code := member.process.poll()) is None:
            await asyncio.sleep(0.05)
        return code

    def signal(self, member: Member, number: signal.Signals) -> None:
        """Send a signal to a process and its children, if it is running."""
        if self.is_running(member):
            os.killpg(member.pid, number)

    def kill_engine(self, member: Member) -> None:
        """Kill the engine of a worker."""
        if self.is_running(member):
            os.kill(member.pid, signal.SIGUSR1)

    def limit_files(self, member: Member, size: int) -> None:
        """Limit the size of a process's files, as on a full disk; -1 removes the limit."""
        limit = resource.RLIM_INFINITY if size < 0 else size
        if self.is_running(member):
            resource.prlimit(member.pid, resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))

    async def supervise(self) -> None:
        """Restart processes that exited, as a supervisor does; report those that had been ready."""
        while True:
            for member in self.members.values():
                if self.is_closing or self.is_running(member) or member.is_expected_to_end:
                    continue
                code = member.process.returncode if member.process is not None else None
                if member.was_ready:
                    self.unexpected_ends.append(f"{member.name} exited unexpectedly with {code}")
                self.start(member)
            await asyncio.sleep(LOOK_SECONDS)

    async def notice_ready(self) -> None:
        """Record which processes have been ready."""
        while True:
            for member in list(self.members.values()):
                if not member.was_ready and not member.is_busy:
                    member.was_ready = await self.is_ready(member)
            await asyncio.sleep(LOOK_SECONDS)

    async def tasks_of(self, member: Member) -> dict[str, int]:
        """Return the number of a process's tasks by coroutine. Raises TimeoutError."""
        target = self._state_file(member.name)
        target.unlink(missing_ok=True)
        async with asyncio.timeout(STATE_SECONDS):
            while not target.exists():
                os.kill(member.pid, signal.SIGUSR2)
                await asyncio.sleep(0.05)
        tasks: dict[str, int] = json.loads(target.read_text())["tasks"]
        return tasks

    async def metric(self, member: Member, name: str) -> float:
        """Return the sum of a metric. Raises OSError if the process does not respond."""
        return await asyncio.to_thread(metric, member.metrics_url, name)

    async def aclose(self) -> None:
        """Stop all processes and proxies."""
        self.is_closing = True
        for member in self.members.values():
            member.links.clear()
            self.signal(member, signal.SIGCONT)
            await self.kill(member)
        for member in self.members.values():
            await member.links.aclose()

    @property
    def armed_file(self) -> Path:
        """The file that lists the armed defects."""
        return self.stack.directory / "armed"

    def _state_file(self, name: str) -> Path:
        return self.stack.directory / f"{name}.state"


def _worker_variables(port: int) -> dict[str, str]:
    return {
        "SLUICE_MODEL_PATH": str(CHECKPOINT),
        "SLUICE_MODEL_NAME": MODEL,
        "SLUICE_HEALTH_PORT": str(port),
        "SLUICE_ENGINE": "scripted",
        "SLUICE_SCRIPTED_STEP_SECONDS": str(STEP_SECONDS),
        "SLUICE_SCRIPTED_COMPLETION_TOKENS": str(COMPLETION_TOKENS),
        "SLUICE_MAX_SEQUENCES": str(MAX_SEQUENCES),
    }


@asynccontextmanager
async def deployed(
    stack: Stack,
    redis: RedisServer,
    *,
    cluster: RedisClusterServers | None = None,
    size: Size,
    clocked: Collection[str] = CLOCKED,
    postgres: PostgresServer | None = None,
    is_planted: bool = False,
    is_hasty: bool = False,
) -> AsyncIterator[Deployment]:
    """Run all processes for the length of a block, on a stack that has none yet.

    The last process of each role in `clocked` has a clock that can be set. On request, the
    processes have all defects, each disarmed, or reservations that expire soon.
    """
    deployment = Deployment(stack, redis, cluster, postgres, clocked)
    common: dict[str, str] = {}
    if is_planted:
        common |= {program.PLANTS: "1", plants.ARMED_FILE: str(deployment.armed_file)}
    if is_hasty:
        common |= {program.SHORT_LEASES: "1", "SLUICE_LEASE_SECONDS": str(WORKER_LEASE_SECONDS)}
    async with AsyncExitStack() as exits:
        exits.push_async_callback(deployment.aclose)
        for role, count in (("gateway", size.gateways), ("worker", size.workers)):
            for number in range(1, count + 1):
                has_clock = role in clocked and number == count
                clock = clock_variables(stack.directory, f"{role}-{number}") if has_clock else {}
                await deployment.add(role, number, {**common, **clock})
        for role in ("jobs", "beat"):
            await deployment.add(role, None, common)
        await asyncio.gather(*(deployment.ready(each) for each in deployment.members.values()))
        watching = [
            asyncio.create_task(work)
            for work in (deployment.supervise(), deployment.notice_ready())
        ]
        try:
            yield deployment
        finally:
            deployment.is_closing = True
            for task in watching:
                task.cancel()
            await asyncio.gather(*watching, return_exceptions=True)


def port_of(url: str) -> int:
    """Return the port of a URL."""
    return urlsplit(url).port or 0
