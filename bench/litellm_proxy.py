"""LiteLLM's proxy with one worker process, like one gateway, in front of a simulated backend.

`running_litellm` is its documented production setup: PostgreSQL, Redis, keys, limits.
`running_without_database` has keys and limits, and Redis, but no PostgreSQL.
"""

import json
import os
import secrets
import shutil
import sys
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.postgres import Postgres
from bench.processes import descendants
from bench.starting import MODEL, Server, StartError, free_port, start
from bench.systems import ENGINE_GROUP, Caller, Route
from gateway.cli.launch.launch_plan import redis_server

_READY_SECONDS = 180.0
_HOOK = Path(__file__).parent / "litellm_auth.py"
_PROVIDER = "text-completion-openai"
_ENOUGH = 10**9
"""A limit that no measurement reaches."""
_LIMITS = {"rpm_limit": _ENOUGH, "tpm_limit": _ENOUGH, "max_budget": _ENOUGH}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rivals:
    """The systems with which LiteLLM's proxy is measured."""

    direct: Route
    unlimited: Route
    """A key without any limit or budget."""
    limited: Route
    """A key of a team and a user, each with limits and a budget."""
    redis_port: int

    @property
    def all(self) -> list[Route]:
        """All systems."""
        return [self.direct, self.unlimited, self.limited]


@contextmanager
def running_litellm(venv: Path, folder: Path, postgres: Postgres) -> Iterator[Rivals]:
    """Run the proxy of a virtual environment within a block."""
    started: list[Server] = []
    try:
        redis_port, backend_port = free_port(), free_port()
        started.append(start_redis(redis_port, folder, redis_server()))
        backend = [sys.executable, "-m", "bench.fake_backend", str(backend_port)]
        started.append(start("fake backend", backend, folder=folder, environment={}))
        master_key = f"sk-{secrets.token_hex(16)}"
        database_url = f"postgresql://{postgres.create_database('litellm')}"
        environment = {
            "DATABASE_URL": database_url,
            "LITELLM_MASTER_KEY": master_key,
            "LITELLM_SALT_KEY": secrets.token_hex(16),
        }
        configuration = _configuration(redis_port, f"http://127.0.0.1:{backend_port}")
        url = _start_proxy(venv, folder, configuration, environment, started)
        yield _rivals(url, master_key, started, postgres, (redis_port, backend_port))
    finally:
        for server in reversed(started):
            server.stop()


@contextmanager
def running_without_database(
    name: str,
    venv: Path,
    folder: Path,
    *,
    backend: Route,
    requests_per_minute: int,
    provider: str = _PROVIDER,
) -> Iterator[Route]:
    """Run the proxy with the keys and limits of `bench.litellm_auth` within a block.

    Args:
        name: Name in reports.
        venv: A virtual environment with LiteLLM's proxy; Prisma's engines are not needed.
        folder: Folder for its files.
        backend: A running backend.
        requests_per_minute: Limit of the route's limited caller.
        provider: LiteLLM's name for the API of the backend.
    """
    started: list[Server] = []
    key, limited_key = f"sk-{secrets.token_hex(16)}", f"sk-{secrets.token_hex(16)}"
    environment = {
        # The proxy refuses to start without it.
        "LITELLM_MASTER_KEY": f"sk-{secrets.token_hex(16)}",
        "BENCH_KEY": key,
        "BENCH_LIMITED_KEY": limited_key,
        "BENCH_REQUESTS_PER_MINUTE": str(requests_per_minute),
    }
    try:
        redis_port = free_port()
        started.append(start_redis(redis_port, folder, redis_server()))
        configuration = _configuration(redis_port, backend.url, provider)
        configuration["general_settings"] = {"custom_auth": "litellm_auth.authenticate"}
        shutil.copy(_HOOK, folder)
        url = _start_proxy(venv, folder, configuration, environment, started)
        redis, proxy = started
        own = {"gateway": [proxy.pid, *descendants(proxy.pid)], "redis": [redis.pid]}
        parts = {**own, **backend.groups(1)}
        few = Caller(api_key=limited_key)
        yield Route(name=name, url=url, api_key=key, limited=few, parts=lambda: parts)
    finally:
        for server in reversed(started):
            server.stop()


def start_redis(port: int, folder: Path, program: str) -> Server:
    """Start the Redis of a gateway that is compared with Sluice."""
    command = [program, "--port", str(port), "--dir", str(folder)]
    command += ["--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
    return start("redis", command, folder=folder, environment={})


def _start_proxy(
    venv: Path,
    folder: Path,
    configuration: dict[str, Any],
    environment: Mapping[str, str],
    started: list[Server],
) -> str:
    """Start the proxy, add it to `started`, and return its base URL when it is ready."""
    path, port = folder / "litellm.json", free_port()
    path.write_text(json.dumps(configuration))
    command = [str(venv / "bin" / "litellm"), "--config", str(path)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--num_workers", "1"]
    own = {
        "LITELLM_MODE": "PRODUCTION",
        "LITELLM_LOG": "ERROR",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "PATH": f"{venv}/bin:{os.environ.get('PATH', '')}",
    }
    proxy = start("litellm", command, folder=folder, environment={**own, **environment})
    started.append(proxy)
    url = f"http://127.0.0.1:{port}"
    proxy.wait_until_ready(f"{url}/health/readiness", seconds=_READY_SECONDS)
    return url


def _rivals(
    url: str,
    master_key: str,
    started: list[Server],
    postgres: Postgres,
    ports: tuple[int, int],
) -> Rivals:
    redis, backend, proxy = started
    redis_port, backend_port = ports
    own, engine = _parts_of(proxy), {ENGINE_GROUP: [backend.pid]}

    def parts() -> dict[str, list[int]]:
        return {**own, "redis": [redis.pid], "postgres": postgres.pids, **engine}

    direct = Route(
        name="the backend itself",
        url=f"http://127.0.0.1:{backend_port}",
        api_key="none",
        parts=lambda: engine,
    )
    keys = _Keys(url, master_key)
    limited, unlimited = (
        Route(name=f"LiteLLM, {name}", url=url, api_key=key, parts=parts)
        for name, key in (("all limits", keys.limited()), ("no limits", keys.unlimited()))
    )
    return Rivals(direct=direct, unlimited=unlimited, limited=limited, redis_port=redis_port)


def _parts_of(proxy: Server) -> dict[str, list[int]]:
    """Return the proxy's own processes and, separately, the one that connects to its database."""
    pids = [proxy.pid, *descendants(proxy.pid)]
    commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids}
    engine = [pid for pid in pids if b"query-engine" in commands[pid]]
    return {
        "LiteLLM": [pid for pid in pids if pid not in engine],
        "its query engine": engine,
    }


def _configuration(redis_port: int, backend_url: str, provider: str = _PROVIDER) -> dict[str, Any]:
    """Return the proxy's configuration; JSON is valid YAML."""
    redis = {"host": "127.0.0.1", "port": redis_port}
    return {
        "model_list": [
            {
                "model_name": MODEL,
                "litellm_params": {
                    "model": f"{provider}/{MODEL}",
                    "api_base": f"{backend_url}/v1",
                    "api_key": "none",
                    "input_cost_per_token": 1.5e-7,
                    "output_cost_per_token": 6e-7,
                },
            }
        ],
        "litellm_settings": {
            "num_retries": 0,
            "telemetry": False,
            "cache": True,
            # Redis stores counters and keys, but not responses.
            "cache_params": {"type": "redis", **redis, "supported_call_types": []},
        },
        "router_settings": {f"redis_{name}": value for name, value in redis.items()},
        "general_settings": {"proxy_batch_write_at": 60},
    }


class _Keys:
    """Creates keys with the proxy's own API."""

    def __init__(self, url: str, master_key: str) -> None:
        self._url = url
        self._master_key = master_key

    def unlimited(self) -> str:
        """Return a key without restrictions."""
        return self._create_key({})

    def limited(self) -> str:
        """Return a key with limits, of a team and a user with limits."""
        team = self._post("/team/new", {"team_alias": "bench", **_LIMITS})
        user = self._post("/user/new", {"auto_create_key": False, **_LIMITS})
        owners = {"team_id": team["team_id"], "user_id": user["user_id"]}
        parallel = {"max_parallel_requests": _ENOUGH, "budget_duration": "30d"}
        return self._create_key({**_LIMITS, **parallel, **owners})

    def _create_key(self, options: dict[str, object]) -> str:
        key: str = self._post("/key/generate", options)["key"]
        return key

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        request = urllib.request.Request(  # noqa: S310 - our own server
            self._url + path,
            json.dumps(body).encode(),
            {"authorization": f"Bearer {self._master_key}", "content-type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=30) as response:  # noqa: S310
                answer: dict[str, Any] = json.load(response)
                return answer
        except OSError as error:
            raise StartError(f"LiteLLM's proxy rejects {path}: {error}") from error
