"""A process of Sluice that reports its state and can be broken.

    python -m tests.failures.chaos.program gateway --port 8080
    python -m tests.failures.chaos.program worker

It runs the same command as `sluice` does. SIGUSR2 writes the process's state to a file, SIGUSR1
kills the scripted engine of a worker. With `CHAOS_PLANTS` the process has all defects that can be
armed, with `CHAOS_SHORT_LEASES` its reservations expire soon. With `CHAOS_FAILING_LOOP` one of its
loops fails as soon as the file of that name exists.
"""

import asyncio
import json
import os
import signal
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.failures.chaos.plants import plant_all
from tests.support.short_leases import shorten_leases

if TYPE_CHECKING:
    from worker.engine.base import Engine

STATE_FILE = "CHAOS_STATE_FILE"
PLANTS = "CHAOS_PLANTS"
SHORT_LEASES = "CHAOS_SHORT_LEASES"
FAILING_LOOP = "CHAOS_FAILING_LOOP"


def main() -> None:
    """Run the role that the first argument names."""
    role, arguments = sys.argv[1], sys.argv[2:]
    signal.signal(signal.SIGUSR2, _write_state)
    if PLANTS in os.environ:
        plant_all(role)
    if role == "worker":
        _run_worker(arguments)
    else:
        from gateway.cli.main import main as sluice

        if SHORT_LEASES in os.environ:
            shorten_leases()
        if FAILING_LOOP in os.environ:
            _plant_failing_loop(Path(os.environ[FAILING_LOOP]))
        sys.argv = ["sluice", role, *arguments]
        sluice(prog_name="sluice")


def _plant_failing_loop(trigger: Path) -> None:
    """Give a gateway a loop that fails once a file exists."""
    from gateway.models.catalogue import Catalogue

    refresh = Catalogue.refresh

    async def refresh_or_fail(self: Catalogue) -> None:
        if trigger.exists():  # noqa: ASYNC240
            raise KeyError
        await refresh(self)

    Catalogue.refresh = refresh_or_fail  # type: ignore[method-assign]


def _run_worker(arguments: list[str]) -> None:
    import worker.main
    from worker.__main__ import command
    from worker.engine.base import Engine
    from worker.settings import WorkerSettings

    engines: list[Any] = []
    make_engine = worker.main.make_engine

    def make_and_remember(settings: WorkerSettings) -> Engine:
        engine = _with_structure(make_engine(settings))
        engines[:] = [engine]
        return engine

    worker.main.make_engine = make_and_remember
    signal.signal(signal.SIGUSR1, lambda *_: engines[-1].die() if engines else None)
    command(arguments, prog_name="python -m worker")


def _with_structure(engine: "Engine") -> "Engine":
    """Let a scripted engine serve forced calls: its output matches their grammars."""
    from contract.messages import Feature
    from worker.engine.scripted import ScriptedEngine

    assert isinstance(engine, ScriptedEngine)
    engine._script = replace(engine._script, claimed_features=[Feature.STRUCTURE])
    return engine


def _write_state(*_: object) -> None:
    """Write the tasks of this process by coroutine."""
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        return
    tasks = Counter(_what_runs(task) for task in asyncio.all_tasks(loop))
    target = Path(os.environ[STATE_FILE])
    draft = target.with_suffix(".draft")
    draft.write_text(json.dumps({"tasks": tasks}))
    draft.rename(target)


def _what_runs(task: "asyncio.Task[Any]") -> str:
    return str(getattr(task.get_coro(), "__qualname__", task.get_coro()))


if __name__ == "__main__":
    main()
