"""The worker process with a real engine in as many processes as on a GPU, which die in turn.

In the default run, tests/failures/kills kills a worker and the process of an engine.
"""

import asyncio
import os
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from contract import keys, messages
from contract.messages import GenerationJob, JobFinished, ReturnReason, WorkerState
from contract.queue import RequeueResult
from contract.sampling import SamplingSpec
from tests.support.processes import children, descendants, is_alive, resident_pages
from tests.support.redis_server import RedisServer
from tests.worker.conftest import MODEL, Gateway, make_job, resumed
from tests.worker.test_process import ended, ready, worker_process

pytestmark = [pytest.mark.e2e, pytest.mark.long]

ENDLESS = SamplingSpec(seed=1, ignore_eos=True)


@pytest.fixture(autouse=True)
def _all_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the core and the model in separate processes, whatever other tests set."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")


def endless(max_tokens: int) -> GenerationJob:
    """Return a job that has so many tokens."""
    return make_job(max_tokens=max_tokens, sampling=ENDLESS)


def engine_core(pid: int) -> int:
    """Return the process of vLLM's scheduler: the child that has children."""
    return next(child for child in children(pid) if children(child))


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


def worker_of_core(pid: int) -> int:
    """Return the process of the model: it has more memory than the core's other children."""
    return max(children(engine_core(pid)), key=resident_pages)


def kill_core(pid: int) -> None:
    os.kill(engine_core(pid), signal.SIGKILL)


def kill_worker(pid: int) -> None:
    os.kill(worker_of_core(pid), signal.SIGKILL)


def stop_both(pid: int) -> None:
    for process in (worker_of_core(pid), engine_core(pid)):
        os.kill(process, signal.SIGSTOP)


async def test_dead_engines_are_replaced_in_the_same_process(
    redis: Redis,
    redis_server: RedisServer,
    gateway: Gateway,
) -> None:
    """A restart and a resumed job follow each fault; then the worker is stopped."""
    harms = (kill_worker, stop_both, kill_core)
    options = ("--engine=vllm", "--context-window=1024", "--stall-seconds=8")
    with worker_process(redis_server, *options, python=(sys.executable, "-P")) as process:
        whole = endless(900)
        await ready_slowly(gateway)
        for number, harm in enumerate(harms, start=1):
            before = descendants(process.pid) - trackers(process.pid)
            job = endless(900)
            await gateway.enqueue(job)
            await gateway.read_until(partial(gateway.deltas, job), seconds=60)
            harm(process.pid)
            await gateway.read_until(partial(gateway.returned, job), seconds=60)
            (returned,) = gateway.returned(job)
            assert (returned.reason, returned.has_progressed) == (ReturnReason.ENGINE_DIED, True)
            assert 0 < len(gateway.token_ids(job)) < 900
            assert await gone(before, 30)
            await restarted(redis, number)
            again = resumed(gateway, job)
            requeued = await gateway.queue.requeue(again, 1, is_returned=True)
            assert requeued is RequeueResult.REQUEUED
            await gateway.finished(job, seconds=120)
            end = gateway.end(job)
            assert isinstance(end, JobFinished)
            assert (end.attempt, end.completion_tokens) == (2, 900)
            assert len(gateway.token_ids(job)) == 900
        await gateway.enqueue(whole)
        await gateway.read_until(partial(gateway.deltas, whole), seconds=60)
        left = descendants(process.pid)
        process.send_signal(signal.SIGTERM)
        await gateway.finished(whole, seconds=120)
        assert isinstance(gateway.end(whole), JobFinished)
        assert await gone({process.pid, *left}, 30)
        assert await ended(process) == 0


def trackers(pid: int) -> set[int]:
    """Return the resource tracker of `multiprocessing`, which outlives engines."""
    return {
        child
        for child in children(pid)
        if b"resource_tracker" in Path(f"/proc/{child}/cmdline").read_bytes()
    }


async def restarted(redis: Redis, times: int) -> None:
    async with asyncio.timeout(240):
        while True:
            card: Any = await redis.get(keys.worker_card(MODEL, "w1"))
            if card is not None:
                known = messages.decode_card(card)
                if known.state is WorkerState.READY and known.engine_restarts == times:
                    return
            await asyncio.sleep(0.1)
