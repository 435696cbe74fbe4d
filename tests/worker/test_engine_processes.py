"""A closed engine leaves no process, not even a hanging or orphaned one."""

import multiprocessing
import os
import signal
import time
from multiprocessing.connection import Connection

import pytest

from tests.support.patience import PATIENCE_SECONDS
from tests.support.processes import is_alive, wait_until
from worker.engine.vllm.processes import EngineProcesses


def sleep_with_a_child(found: "Connection[int, int] | None") -> None:
    """Start a process that sleeps, send its id, and sleep."""
    if found is not None:
        child = multiprocessing.get_context("spawn").Process(
            target=sleep_with_a_child, args=(None,)
        )
        child.start()
        assert child.pid is not None
        found.send(child.pid)
    time.sleep(600)


def start() -> tuple[int, int]:
    """Start a process that has a child. Return both ids."""
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    process = context.Process(target=sleep_with_a_child, args=(theirs,))
    process.start()
    assert process.pid is not None
    return process.pid, mine.recv()


def test_processes_and_their_children_are_killed_and_no_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("worker.engine.vllm.processes._GONE_SECONDS", PATIENCE_SECONDS)
    other, child_of_other = start()
    processes = EngineProcesses()
    core, child = start()
    hung, child_of_hung = start()
    processes.look()
    for pid in (hung, child_of_hung):
        os.kill(pid, signal.SIGSTOP)
    os.kill(core, signal.SIGKILL)
    wait_until(lambda: not is_alive(core), what="its end")
    assert is_alive(child), "orphaned"
    processes.kill()
    assert not any(map(is_alive, (child, hung, child_of_hung)))
    assert is_alive(other)
    assert is_alive(child_of_other)
    processes.kill()
    for pid in (child_of_other, other):
        os.kill(pid, signal.SIGKILL)
    for process in multiprocessing.active_children():
        process.join(10)
