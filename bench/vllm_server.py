"""vLLM's own OpenAI API server on the same model, with the engine flags of Sluice's worker."""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

from bench.processes import descendants
from bench.starting import MODEL, Server, free_port, start
from bench.systems import ENGINE_GROUP, Deployment

READY_SECONDS = 600.0

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
}
"""Flags that the worker's engine sets for itself (worker/engine/vllm/engine.py)."""


class VllmServer:
    """A running `vllm.entrypoints.openai.api_server`."""

    name = "vLLM's server"
    front = "API server"
    """Its process without the engine."""

    def __init__(self, server: Server, url: str) -> None:
        self._server = server
        self._url = url

    def urls(self, number: int) -> list[str]:
        """Return its base URL; there is only one front end."""
        if number != 1:
            raise ValueError(f"number: {self.name} has 1 front door. Given: {number}")
        return [self._url]

    def key(self, tenant: str) -> str:
        """Return an empty key: the server has no tenants."""
        del tenant
        return ""

    def groups(self, front_doors: int) -> dict[str, list[int]]:
        """Return the front's process and, separately, those of its engine."""
        del front_doors
        return {self.front: [self._server.pid], ENGINE_GROUP: descendants(self._server.pid)}


@contextmanager
def running_vllm_server(
    deployment: Deployment,
    folder: Path,
    *,
    flags: Sequence[str] = (),
    environment: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[VllmServer]:
    """Run the server within a block, with more flags and environment variables."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--port", str(port)]
    server = start(
        "vllm server",
        [*command, *_flags(deployment), *flags],
        folder=folder,
        environment={**ENVIRONMENT, **environment},
    )
    try:
        server.wait_until_ready(f"{url}/health", seconds=READY_SECONDS)
        yield VllmServer(server, url)
    finally:
        server.stop()


def _flags(deployment: Deployment) -> list[str]:
    options = {
        "host": "127.0.0.1",
        "served_model_name": MODEL,
        "disable_uvicorn_access_log": True,
        **deployment.vllm_arguments(),
    }
    return [text for name, value in options.items() for text in _flag(name, value)]


def _flag(name: str, value: object) -> list[str]:
    """Return an engine argument as vLLM's command line has it."""
    option = name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{option}" if value else f"--no-{option}"]
    return [f"--{option}", value if isinstance(value, str) else json.dumps(value)]
