"""The health checks of docker-compose.yml, run unchanged against real processes.

Host names, addresses of all interfaces and fixed ports are replaced with those of this machine.
"""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest
from click.testing import CliRunner
from typing_extensions import override

from gateway.cli.main import main
from tests.deploy.compose_file import Service, services
from tests.support.patience import PATIENCE_SECONDS
from tests.support.postgres_server import PROGRAMS
from tests.support.processes import free_port, is_free, spawn, stop, wait_until
from tests.support.redis_server import BUNDLED, SYSTEM
from tests.support.stack import CHECKPOINT, REPOSITORY

IMAGE = REPOSITORY / "deploy" / "docker"
"""The working directory of the images."""
SCRIPT = IMAGE / "healthcheck.py"
PORTS = {"gateway": "8080", "celery": "9464", "beat": "9464", "worker": "9465"}


@dataclass
class Containers:
    """Processes that start like the services of docker-compose.yml."""

    folder: Path
    ports: dict[str, int] = field(default_factory=dict)
    processes: dict[str, "subprocess.Popen[bytes]"] = field(default_factory=dict)

    def start_redis(self) -> None:
        """Start Redis with the command of the service, on the same port each time."""
        service = services()["redis"]
        port = self.ports.setdefault("redis", free_port())
        words = {"/etc/redis/": f"{REPOSITORY / 'ops' / 'redis'}/", "/data": str(self.folder)}
        command = [_replaced(word, words) for word in service.options["command"]]
        command += ["--port", str(port), "--bind", "127.0.0.1"]
        path = f"{Path(SYSTEM or BUNDLED).parent}:{os.environ['PATH']}"
        temporary = {"PATH": path, "TMPDIR": str(self.folder)}
        self._spawn("redis", command, service.environment | temporary)

    def start(self, name: str) -> None:
        """Start a process of Sluice with the environment of its service."""
        self.ports[name] = free_port()
        command = [sys.executable, "-m", "gateway.cli.main"]
        self._spawn(
            name, command + services()[name].options["command"], self._environment(services()[name])
        )

    def run_migrations(self) -> None:
        """Run the one-shot service that upgrades the schema."""
        service = services()["migrate"]
        runner = CliRunner(env=self._environment(service))
        migrated = runner.invoke(main, service.options["command"])
        assert migrated.exit_code == 0, migrated.output

    def check(self, name: str) -> tuple[int, str]:
        """Run a service's health check as Docker would. Return its exit status and output."""
        service, port = services()[name], self.ports[name]
        words = {
            "python": sys.executable,
            "redis-cli": f"redis-cli -p {port}",
            f":{PORTS.get(name)}/": f":{port}/",
        }
        command = [_replaced(word, words) for word in service.check]
        done = subprocess.run(
            command,
            cwd=IMAGE,
            env={**os.environ, **service.environment},
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE_SECONDS,
        )
        return done.returncode, done.stdout + done.stderr

    def wait_until_healthy(self, name: str) -> None:
        """Wait until the check succeeds; raise with the log of a process that has ended."""

        def is_settled() -> bool:
            if self.processes[name].poll() is not None:
                return True
            # A check is a process, which would take CPU time from the starting service.
            return not is_free(self.ports[name]) and self.check(name) == (0, "")

        wait_until(is_settled, what=f"{name} being healthy")
        if self.processes[name].poll() is not None:
            raise RuntimeError(f"{name} ended:\n{self.log(name)}")

    def log(self, name: str) -> str:
        """Return the log of this service's process."""
        return (self.folder / f"{name}.log").read_text()

    def stop(self, name: str) -> int:
        """Stop a process as its service does, without its time limit. Return its exit status."""
        process = self.processes.pop(name)
        # Celery handles signals only some time after its health check succeeds.
        wait_until(lambda: _catches_sigterm(process.pid), what=f"{name} handling signals")
        return stop(process, seconds=max(services()[name].stop_seconds, PATIENCE_SECONDS))

    def _environment(self, service: Service) -> dict[str, str]:
        words = {
            "@redis:6379": f"@127.0.0.1:{self.ports['redis']}",
            "postgresql+asyncpg://sluice:p0stgres@postgres:5432/sluice": (
                f"sqlite+aiosqlite:///{self.folder}/sluice.db"
            ),
            "http://otel-collector:4318": "http://127.0.0.1:9",
            "0.0.0.0": "127.0.0.1",
            "/app/demo-model": str(CHECKPOINT),
        }
        environment = {name: _replaced(value, words) for name, value in service.environment.items()}
        if "SLUICE_OPERATOR_PORT" in environment:
            environment["SLUICE_OPERATOR_PORT"] = str(free_port())
        return {
            name: str(self.ports[service.name]) if value == PORTS.get(service.name) else value
            for name, value in environment.items()
        }

    def _spawn(self, name: str, command: list[str], environment: Mapping[str, str]) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = spawn(
                *command,
                cwd=REPOSITORY,
                env={**os.environ, **environment},
                stdout=log,
                stderr=log,
            )


def _catches_sigterm(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    [caught] = [line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")]
    return bool(int(caught, 16) >> (signal.SIGTERM - 1) & 1)


def _replaced(text: str, words: Mapping[str, str]) -> str:
    for word, other in words.items():
        text = text.replace(word, other)
    return text


@pytest.fixture(scope="module")
def containers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Containers]:
    """Redis and a database with its schema."""
    if shutil.which("redis-cli") is None:
        pytest.skip("redis-cli (of Debian's redis-server package) is not installed")
    containers = Containers(tmp_path_factory.mktemp("containers"))
    containers.start_redis()
    try:
        containers.wait_until_healthy("redis")
        containers.run_migrations()
        yield containers
    finally:
        for process in reversed(containers.processes.values()):
            stop(process)


def test_redis_keeps_its_data_and_requires_its_password(containers: Containers) -> None:
    containers.wait_until_healthy("redis")
    client = ["redis-cli", "-p", str(containers.ports["redis"])]
    stranger = subprocess.run([*client, "ping"], capture_output=True, text=True, check=True)
    assert "NOAUTH" in stranger.stdout
    wanted = {"appendonly": "yes", "maxmemory-policy": "noeviction", "maxmemory": "1073741824"}
    for name, value in wanted.items():
        answer = subprocess.run(
            [*client, "config", "get", name],
            env={**os.environ, **services()["redis"].environment},
            capture_output=True,
            text=True,
            check=True,
        )
        assert answer.stdout.split() == [name, value]


def test_gateway_is_healthy_while_it_serves_and_redis_responds(containers: Containers) -> None:
    containers.start("gateway")
    containers.wait_until_healthy("gateway")
    containers.stop("redis")

    def misses_redis() -> bool:
        status, text = containers.check("gateway")
        assert status == 1
        # A gateway without CPU time may not respond at all.
        return "redis does not respond" in text

    wait_until(misses_redis, what="the gateway reporting Redis as unavailable")
    containers.start_redis()
    containers.wait_until_healthy("gateway")
    assert containers.stop("gateway") == 0
    status, text = containers.check("gateway")
    assert status == 1
    assert "does not answer" in text


@pytest.mark.slow
@pytest.mark.parametrize("name", ["celery", "beat", "worker"])
def test_process_is_healthy_while_it_works(containers: Containers, name: str) -> None:
    containers.start(name)
    containers.wait_until_healthy(name)
    assert containers.stop(name) == 0, containers.log(name)
    assert containers.check(name)[0] == 1


def test_postgresql_is_checked_with_pg_isready(postgres_sockets: str) -> None:
    service = services()["postgres"]
    program, *options = service.check
    assert program == "pg_isready"
    # The server of the tests has a socket instead of a port, and another user.
    asked = [option.replace("127.0.0.1", postgres_sockets) for option in options]

    def status(arguments: list[str]) -> int:
        command = [str(PROGRAMS / program), *arguments]
        return subprocess.run(command, check=False, timeout=PATIENCE_SECONDS).returncode

    # Its timeout is three seconds.
    wait_until(lambda: status(asked) == 0, what="the server being ready")
    nobody = [option.replace("127.0.0.1", "/no/such/folder") for option in options]
    assert status(nobody) == 2


# --- the health check program of the images -----------------------------------------------------


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/good" else 503)
        self.end_headers()
        self.wfile.write(b"for a reason\n")

    @override
    def log_message(self, *_line: object) -> None:
        """Log nothing."""


@contextmanager
def serving() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), _Handler) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def ask(url: str) -> tuple[int, str]:
    # Isolated, as in an image: the repository cannot be imported.
    command = [sys.executable, "-I", str(SCRIPT), url]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=PATIENCE_SECONDS
    )
    return done.returncode, done.stdout + done.stderr


def test_status_200_is_healthy() -> None:
    with serving() as url:
        # Its timeout is three seconds.
        wait_until(lambda: ask(f"{url}/good") == (0, ""), what="a healthy answer")


def test_other_status_is_reported_with_its_text() -> None:
    with serving() as url:
        reported = (1, f"{url}/bad answers 503: for a reason\n")
        wait_until(lambda: ask(f"{url}/bad") == reported, what="the reason")


def test_refused_connection_is_reported_without_a_traceback() -> None:
    status, text = ask(f"http://127.0.0.1:{free_port()}/healthz")
    assert status == 1
    assert "does not answer" in text
    assert "Traceback" not in text
