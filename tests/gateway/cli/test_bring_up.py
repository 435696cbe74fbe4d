"""The sequence of `sluice up`, with programs that do nothing in place of the real ones."""

import asyncio
import os
import signal
import stat
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gateway.cli.launch import bring_up, up
from gateway.cli.launch.bring_up import BringUp
from gateway.cli.launch.launch_plan import LaunchPlan, make_plan
from gateway.process.supervision.supervisor import ChildSpec
from tests.gateway.cli.conftest import Sluice
from tests.support.patience import PATIENCE_SECONDS
from tests.support.processes import is_alive
from tests.support.redis_server import RedisServer


@pytest.mark.parametrize("number", bring_up.SIGNALS)
async def test_signal_during_the_start_leaves_nothing(
    number: signal.Signals,
    tmp_path: Path,
    database_url: str,
    redis_server: RedisServer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # This process would remain the parent of orphans of later tests.
    monkeypatch.setattr(bring_up, "adopt_orphans", lambda: None)
    (tmp_path / ".sluice").mkdir()
    logs = {name: tmp_path / f"{name}.log" for name in ("redis", "jobs", "worker")}
    program = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    specs = {
        name: ChildSpec(
            name=name, command=(sys.executable, "-c", program), log=log, stop_seconds=10
        )
        for name, log in logs.items()
    }
    plan = LaunchPlan(
        folder=tmp_path / ".sluice",
        model_name="m",
        redis_url=redis_server.url,
        redis=specs["redis"],
        database_url=database_url,
        ports=[1],
        operator_ports=[2],
        jobs=[specs["jobs"]],
        gateways=[],
        worker=specs["worker"],
        command_variables={},
    )
    running = asyncio.create_task(BringUp(plan).run())
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not all(log.exists() and log.read_text().endswith("\n") for log in logs.values()):
            await asyncio.sleep(0.01)
        os.kill(os.getpid(), number)
        await running
    assert capsys.readouterr().out.endswith("All processes have stopped.\n")
    assert not any(is_alive(int(log.read_text())) for log in logs.values())
    assert list((tmp_path / ".sluice").iterdir()) == []


def test_model_that_cannot_be_loaded_ends_the_start(
    tmp_path: Path, sluice: Sluice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With only Redis and the real worker; the file of an earlier run is removed."""
    monkeypatch.setattr(bring_up, "adopt_orphans", lambda: None)

    def only_the_worker(*given: Any, **options: Any) -> LaunchPlan:
        return replace(make_plan(*given, **options), jobs=[], gateways=[])

    monkeypatch.setattr(up, "make_plan", only_the_worker)
    demo = tmp_path / ".sluice" / "demo.env"
    demo.parent.mkdir()
    demo.write_text("SLUICE_KEY=sk-made-up\n")
    result = sluice("up", "--engine", "scripted", "--model", "./no/such/model")
    assert result.exit_code == 1
    assert "The worker did not start" in result.output
    assert "no/such/model" in result.output
    assert "Traceback" not in result.output
    assert [path.name for path in demo.parent.glob("*.env*")] == ["keys.env"]
    assert stat.S_IMODE(demo.parent.stat().st_mode) == 0o700
