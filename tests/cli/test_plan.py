"""The processes that `sluice up` starts."""

from pathlib import Path

import pytest

from gateway.launch.launch_plan import UpOptions, make_plan
from gateway.settings import Settings


def worker_command(folder: Path, *arguments: str, model: str | None = None) -> tuple[str, ...]:
    options = UpOptions(
        sluice=("sluice",),
        port=None,
        operator_port=None,
        gateways=1,
        workers=1,
        model=model,
        engine="vllm",
        context_window=None,
        redis_url="redis://127.0.0.1:1/0",
        database_url="sqlite+aiosqlite://",
        worker_arguments=arguments,
    )
    (worker,) = make_plan(options, folder, Settings()).workers
    return worker.command


def test_demo_model_has_its_parsers(tmp_path: Path) -> None:
    command = worker_command(tmp_path, "--tool-parser", "granite")
    assert command[-6:-2] == ("--tool-parser", "hermes", "--reasoning-parser", "qwen3")
    assert command[-2:] == ("--tool-parser", "granite"), "the last one counts"


@pytest.mark.parametrize("name", ["--tool-parser", "--reasoning-parser"])
def test_other_models_have_no_parsers(tmp_path: Path, name: str) -> None:
    assert name not in worker_command(tmp_path, model="/models/other")


def test_several_gateways_and_workers_have_separate_ports_names_and_logs(
    tmp_path: Path,
) -> None:
    options = UpOptions(
        sluice=("sluice",),
        port=None,
        operator_port=None,
        gateways=2,
        workers=2,
        model=None,
        engine="scripted",
        context_window=None,
        redis_url=None,
        database_url=None,
        worker_arguments=(),
    )
    plan = make_plan(options, tmp_path, Settings())
    first, second = plan.ports
    assert second == first + 1
    assert not {*plan.ports} & {*plan.operator_ports}
    for each, port, operator_port in zip(
        plan.gateways, plan.ports, plan.operator_ports, strict=True
    ):
        assert each.command[-4:] == ("--port", str(port), "--operator-port", str(operator_port))
        assert each.environment["SLUICE_OPERATOR_HOST"] == "127.0.0.1"
    # All gateways have the same salt, another one in each run.
    salts = [each.environment["SLUICE_CACHE_SALT_SECRET"] for each in plan.gateways]
    again = make_plan(options, tmp_path, Settings()).gateways[0]
    assert salts[0] == salts[1] != again.environment["SLUICE_CACHE_SALT_SECRET"]
    assert plan.redis is not None
    assert "maxmemory 512mb" in plan.redis.configuration.splitlines()
    assert [each.name for each in plan.gateways] == ["gateway 1", "gateway 2"]
    assert [each.name for each in plan.workers] == ["worker 1", "worker 2"]
    assert len({each.log for each in (*plan.gateways, *plan.workers, *plan.jobs)}) == 6
