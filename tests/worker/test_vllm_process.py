"""The worker process with the real engine: how it ends, and that nothing of it is left behind."""

import asyncio
import os
import signal
from contextlib import suppress
from pathlib import Path

import pytest

from contract.messages import JobFinished
from contract.sampling import SamplingSpec
from tests.worker.conftest import Gateway, RedisServer, make_job
from tests.worker.test_process import ready, worker_process

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

ENDLESS = SamplingSpec(seed=1, ignore_eos=True)


def children(pid: int) -> set[int]:
    """Return the ids of the processes that a process's threads have started; none if it is gone."""
    found: set[int] = set()
    for thread in Path("/proc").glob(f"{pid}/task/*/children"):
        # A thread may end between being listed and being read.
        with suppress(FileNotFoundError, ProcessLookupError):
            found.update(int(child) for child in thread.read_text().split())
    return found


def descendants(pid: int) -> set[int]:
    """Return the ids of a process's children, their children, and so on."""
    found = children(pid)
    return found.union(*map(descendants, found))


def engine_core(pid: int) -> int:
    """Return the process that vLLM's scheduler runs in: the child that has children of its own."""
    return next(child for child in children(pid) if children(child))


def is_alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rsplit(")", 1)[1].split()[0] != "Z"


async def gone(pids: set[int], seconds: float) -> bool:
    async with asyncio.timeout(seconds):
        while any(is_alive(pid) for pid in pids):
            await asyncio.sleep(0.05)
    return True


async def ready_slowly(gateway: Gateway) -> None:
    for attempt in range(6):
        try:
            await ready(gateway)
        except TimeoutError:
            assert attempt < 5, "the engine did not start within two minutes"
        else:
            return


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGTERM, 0), (signal.SIGKILL, -signal.SIGKILL)],
    ids=["terminated", "killed"],
)
async def test_end_of_a_worker(
    redis_server: RedisServer,
    gateway: Gateway,
    number: signal.Signals,
    code: int,
) -> None:
    job = make_job(max_tokens=1000, sampling=ENDLESS)
    async with worker_process(redis_server, "--engine=vllm", "--context-window=1024") as process:
        await ready_slowly(gateway)
        processes = descendants(process.pid)
        assert len(processes) >= 2
        await gateway.enqueue(job)
        # Like the start, the first step takes its time on a busy machine.
        await gateway.read_until(lambda: bool(gateway.deltas(job)), seconds=60)
        os.kill(process.pid, number)
        if code == 0:
            await gateway.finished(job, seconds=30)
            assert isinstance(gateway.end(job), JobFinished)
        # The engine's processes share the pipe that `wait` waits for: look at them first.
        assert await gone({process.pid, *processes}, 15)
        assert await asyncio.wait_for(process.wait(), 5) == code
