"""One deployment with the real engine for a whole run of pytest, shared by all of its processes.

    python -m tests.support.deployment NAME FOLDER

A separate keeper process starts it for the first process that needs it. The keeper stops it when
the last process has exited, was killed, or no longer uses it.
"""

import fcntl
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Final

import httpx
import pytest

from tests.support.processes import free_port, wait_until
from tests.support.redis_server import BUNDLED, RedisServer
from tests.support.stack import (
    CHECKPOINT,
    ENGINE_START_SECONDS,
    MODEL,
    REPOSITORY,
    Stack,
    locked,
    make_model,
    running_stack,
)
from tests.telemetry.traces.collector import Collector

DEPLOYMENT: Final = "deployment"
"""The fixture of its tests; tests that select an engine have it as their parameter `engine`."""
ENGINES: Final = "engines"
"""Two gateways, and a worker with the real engine."""
SEEING: Final = "sluice-seeing"
"""The same, and a worker with a tiny vision model of this name."""

ALIASES: Final = ("mistral", "your-model")
"""Model names in requests from the documents of other APIs."""
LEASE_SECONDS: Final = 60
"""No test kills its workers, and none may lose a job because of a busy machine."""
MAX_SEQUENCES: Final = 96
MAX_WAITING_JOBS_OF_TENANT: Final = 100
FLOAT32: Final = {"SLUICE_ENGINE_ARGUMENTS": '{"dtype": "float32"}'}
"""In bfloat16 the shape of a batch can change tokens, and so could requests of other tests."""

COLLECTOR_PORT: Final = "port of the collector"
"""In a stack's environment: where clients' traces are exported if they are sampled."""

_STATE: Final = "state.json"
_USERS: Final = "users.lock"
_START: Final = "start.lock"
_TURN: Final = "turn.lock"
_ROOM: Final = "room.lock"
_CLOSE_SECONDS: Final = 120


def shared_folder(config: pytest.Config) -> Path:
    """Return the folder that all processes of this run share."""
    # There is no public name for it.
    own: Path = config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
    return own.parent if hasattr(config, "workerinput") else own


def uses_deployment(item: pytest.Function) -> bool:
    """Return whether a test uses the deployment."""
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    return DEPLOYMENT in item.fixturenames or parameters.get("engine") == DEPLOYMENT


@contextmanager
def place(config: pytest.Config, *, alone: bool) -> Iterator[None]:
    """Use the deployment together with other processes, or alone; later users wait for that."""
    folder = shared_folder(config)
    with (folder / _ROOM).open("ab") as room:
        with locked(folder / _TURN, fcntl.LOCK_EX):
            fcntl.flock(room, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        yield


def attach(config: pytest.Config, name: str = ENGINES) -> Stack:
    """Return a deployment, started if necessary, for the rest of this process's tests.

    What this process starts in it ends with this process; all else ends with the last process of
    the run.
    """
    user = _User(shared_folder(config) / name, name)
    # Not in a fixture: the last test's timeout would have to cover the wait for other processes.
    config.pluginmanager.register(user)
    return user.stack


class _User:
    """This process's use of a deployment."""

    def __init__(self, folder: Path, name: str) -> None:
        folder.mkdir(exist_ok=True)
        self._keeper: subprocess.Popen[bytes] | None = None
        # The kernel releases it when this process ends, in any way.
        self._share = (folder / _USERS).open("ab")
        fcntl.flock(self._share, fcntl.LOCK_SH)
        with locked(folder / _START, fcntl.LOCK_EX):
            if not (folder / _STATE).exists():
                self._keeper = _start_keeper(folder, name)
        self.stack = _read_stack(folder)

    def pytest_sessionfinish(self) -> None:
        """Release the deployment; the process that started the keeper waits for its end."""
        self.stack.close()
        self._share.close()
        if self._keeper is not None:
            self._keeper.wait(_CLOSE_SECONDS)


def _start_keeper(folder: Path, name: str) -> "subprocess.Popen[bytes]":
    log, state = folder / "keeper.log", folder / _STATE
    with log.open("wb") as output:
        keeper = subprocess.Popen(
            [sys.executable, "-m", "tests.support.deployment", name, str(folder)],
            cwd=REPOSITORY,
            stdout=output,
            stderr=subprocess.STDOUT,
            # Ctrl-C of pytest must not reach the keeper, which stops everything in order.
            start_new_session=True,
        )
    wait_until(
        lambda: state.exists() or keeper.poll() is not None,
        # The keeper's timeout is shorter, and it reports the reason.
        seconds=ENGINE_START_SECONDS + 60,
        what=f"the start of {name}",
    )
    if not state.exists():
        raise RuntimeError(f"{name} did not start:\n{log.read_text(errors='replace')}")
    return keeper


def _write_stack(stack: Stack, folder: Path) -> None:
    assert isinstance(stack.redis, RedisServer)
    state = {
        "directory": str(stack.directory),
        "redis": [stack.redis.port, stack.redis.url],
        "environment": stack.environment,
        "gateways": stack.gateways,
    }
    draft = folder / "draft.json"
    draft.write_text(json.dumps(state))
    draft.replace(folder / _STATE)


def _read_stack(folder: Path) -> Stack:
    state = json.loads((folder / _STATE).read_text())
    redis = RedisServer(BUNDLED)
    redis.port, redis.url = state["redis"]
    return Stack(Path(state["directory"]), redis, state["environment"], gateways=state["gateways"])


@contextmanager
def _engines(_folder: Path) -> Iterator[Stack]:
    """Run two gateways and a worker for the length of a block."""
    port = free_port()
    collector = Collector(f"http://127.0.0.1:{port}")
    traced = {**collector.environment, "OTEL_TRACES_SAMPLER": "parentbased_always_off"}
    waiting = {"SLUICE_MAX_WAITING_JOBS_OF_TENANT": str(MAX_WAITING_JOBS_OF_TENANT)}
    with running_stack() as stack:
        stack.launch_worker(
            environment={
                "SLUICE_LEASE_SECONDS": str(LEASE_SECONDS),
                "SLUICE_MAX_SEQUENCES": str(MAX_SEQUENCES),
                "SLUICE_MODEL_ALIASES": ",".join(ALIASES),
                "SLUICE_ADAPTER_SLOTS": "2",
                "SLUICE_ADAPTER_FOLDER": str(stack.directory / "adapters"),
                **FLOAT32,
                **traced,
            }
        )
        for name in ("gateway-1", "gateway-2"):
            stack.start_gateway(name, **waiting, **traced)
        stack.await_worker()
        stack.environment[COLLECTOR_PORT] = str(port)
        yield stack


@contextmanager
def _seeing(folder: Path) -> Iterator[Stack]:
    """Run a worker with a vision model in the other deployment, which this process uses too."""
    model = folder / "model"
    make_model("tests.support.vision_model", CHECKPOINT, model, log=folder / "model.log")
    user = _User(folder.parent / ENGINES, ENGINES)
    try:
        user.stack.start_worker(
            SEEING,
            SLUICE_MODEL_PATH=str(model),
            SLUICE_MODEL_NAME=SEEING,
            SLUICE_LEASE_SECONDS=str(LEASE_SECONDS),
            SLUICE_MAX_SEQUENCES="8",
            **FLOAT32,
        )
        yield user.stack
    finally:
        user.pytest_sessionfinish()


_KEPT: Final[dict[str, tuple[Callable[[Path], AbstractContextManager[Stack]], str]]] = {
    ENGINES: (_engines, MODEL),
    SEEING: (_seeing, SEEING),
}
"""How to run each deployment, and the model that it serves."""


def _is_model_ready(url: str, headers: dict[str, str]) -> bool:
    return bool(httpx.get(url, headers=headers).json().get("ready", False))


def main() -> None:
    """Run a deployment until it has no users."""
    name, folder = sys.argv[1], Path(sys.argv[2])
    keep, model = _KEPT[name]
    with keep(folder) as stack:
        headers = {"authorization": f"Bearer {stack.key()}"}
        for url in stack.gateways:
            path = f"{url}/v1/models/{model}"
            wait_until(
                partial(_is_model_ready, path, headers),
                what=f"{model} being registered as ready",
            )
        _write_stack(stack, folder)
        with locked(folder / _USERS, fcntl.LOCK_EX):
            # Later processes start another one.
            (folder / _STATE).unlink()


if __name__ == "__main__":
    main()
