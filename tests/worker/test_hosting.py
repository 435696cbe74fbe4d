"""Worker hosts: which model is served when, and the swaps of a host process."""

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from pydantic import SecretStr
from redis.asyncio import Redis

from contract import keys, messages
from contract.messages import GenerationJob, ReturnReason, WorkerCard, WorkerState
from contract.queue import JobQueue, ModelStatus, RequeueResult
from tests.support.cases import all_cases
from tests.support.patience import PROCESS_PATIENCE_SECONDS
from tests.support.processes import children, is_alive
from tests.support.redis_server import RedisServer
from tests.worker.conftest import MODEL_FOLDER, Gateway, make_job, resumed
from worker.hosting import process as hosted
from worker.hosting.__main__ import command
from worker.hosting.host import Host, Hysteresis, choose
from worker.hosting.process import HostedWorker
from worker.hosting.settings import HostSettings, read_models

ROOT = Path(__file__).parents[2]
KEPT = Hysteresis(least_seconds=10, ratio=2, longest_wait_seconds=30)
SERVED, IDLE, BUSY = ModelStatus(1, 0, 3), ModelStatus(1, 0, 0), ModelStatus(1, 8, 3)


def sleeping(jobs: int = 0, *, waits: float = 0.0, batch: int = 0) -> ModelStatus:
    """Return the status of a model without a worker."""
    return ModelStatus(0, jobs, 0, 1, waits, batch)


CHOICES: dict[str, tuple[ModelStatus | None, list[ModelStatus], float, str | None]] = {
    "nothing waits": (IDLE, [sleeping()], 99, None),
    "first model": (None, [sleeping(1), sleeping(2)], 0, "m1"),
    "an idle model is left at once": (IDLE, [sleeping(1), sleeping(2)], 0, "m1"),
    "running jobs are kept": (SERVED, [sleeping(1)], 9, None),
    "running jobs are left for waiting ones": (SERVED, [sleeping(1)], 10, "m0"),
    "twice as many jobs are too few": (BUSY, [sleeping(16)], 11, None),
    "more are enough": (BUSY, [sleeping(17)], 11, "m0"),
    "not at first": (BUSY, [sleeping(17)], 9, None),
    "jobs count for each worker": (BUSY, [ModelStatus(1, 17, 9)], 11, None),
    "long wait": (BUSY, [sleeping(9, waits=1), sleeping(1, waits=31)], 11, "m1"),
    "long wait for a worker that runs": (BUSY, [ModelStatus(1, 1, 9, 1, 31)], 11, None),
    "another host serves the rest": (ModelStatus(2, 0, 3), [sleeping(1)], 0, "m0"),
    "batch jobs in idle time": (IDLE, [sleeping(batch=5)], 0, "m0"),
    "batch jobs interrupt nothing": (SERVED, [sleeping(batch=5)], 99, None),
    "not even batch jobs": (ModelStatus(1, 0, 0, 0, 0, 2), [sleeping(batch=5)], 99, None),
    "requests before batch jobs": (IDLE, [sleeping(batch=5), sleeping(1)], 0, "m1"),
}


@all_cases(("own", "others", "served_seconds", "chosen"), CHOICES.values(), ids=CHOICES)
def test_model_is_chosen_by_waiting_work(
    own: ModelStatus | None, others: list[ModelStatus], served_seconds: float, chosen: str | None
) -> None:
    statuses = {f"m{index}": status for index, status in enumerate(others)}
    current = None
    if own is not None:
        current, statuses["own"] = "own", own
    assert choose(current, statuses, served_seconds=served_seconds, hysteresis=KEPT) == chosen


FAULTS: dict[str, Any] = {
    "must be a JSON list": "{}",
    "has no model": "[]",
    "model 0: model_path: /missing has no config.json": [{"model_path": "/missing"}],
    "model 0: speed: Extra inputs": [{"model_path": "a", "speed": 1}],
    "model 0: max_sequences: Input should be greater than or equal to 1. Given: '0'": [
        {"model_path": "a", "max_sequences": 0}
    ],
    "model 0: the host sets worker_id": [{"model_path": "a", "worker_id": "w"}],
    "model 1: a is given twice": [{"model_path": "x/a"}, {"model_path": "y/a"}],
}


@all_cases(("reason", "content"), FAULTS.items())
def test_invalid_models_are_reported(tmp_path: Path, reason: str, content: Any) -> None:
    path = tmp_path / "models.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    result = CliRunner().invoke(command, ["--models", str(path)])
    assert result.exit_code == 2
    assert reason in result.output


def test_health_port_in_use_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "models.json"
    path.write_text(json.dumps([{"model_path": str(MODEL_FOLDER), "engine": "scripted"}]))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = CliRunner().invoke(command, ["--models", str(path), f"--health-port={port}"])
    assert result.exit_code == 2
    assert f"--health-port: cannot listen on 127.0.0.1:{port} (Address already" in result.output


def write_models(folder: Path, *names: str, **settings: Any) -> Path:
    """Write the file of a host's models, with the scripted engine."""
    shared = {
        "engine": "scripted",
        "model_path": str(MODEL_FOLDER),
        "scripted_step_seconds": 0.01,
        "drain_seconds": 0.2,
        "scripted_dies_on_signal": True,
        **settings,
    }
    models = folder / "models.json"
    models.write_text(json.dumps([shared | {"model_name": name} for name in names]))
    return models


@asynccontextmanager
async def host_process(
    redis_server: RedisServer, folder: Path, *names: str, sleeping: int = 0
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Start a host of models with the scripted engine."""
    models = write_models(folder, *names)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "worker.hosting", f"--models={models}", "--least-seconds=0.5"),
        *(f"--redis-url={redis_server.url}", f"--sleeping-models={sleeping}"),
        cwd=ROOT,
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(PROCESS_PATIENCE_SECONDS):
            await process.wait()


async def serves(queue: JobQueue) -> None:
    """Wait until a worker claims jobs of a model."""
    async with asyncio.timeout(PROCESS_PATIENCE_SECONDS):
        while not (await queue.status()).ready_workers:
            await asyncio.sleep(0.02)


async def ends(pid: int) -> None:
    """Wait until a process has ended."""
    async with asyncio.timeout(PROCESS_PATIENCE_SECONDS):
        while is_alive(pid):
            await asyncio.sleep(0.02)


async def states(redis: Redis, *names: str) -> dict[str, WorkerState]:
    """Return the state of each model's worker that announces one."""
    found = {}
    for name in names:
        async for key in redis.scan_iter(keys.worker_card(name, "*")):
            card: Any = await redis.get(key)
            if card is not None:
                found[name] = messages.decode_card(card).state
    return found


async def swap_begins(
    redis: Redis, gateway: Gateway, served: JobQueue, other: JobQueue
) -> tuple[GenerationJob, GenerationJob]:
    """Let a host's served model run a long job while another model gets one; return both jobs."""
    stuck, job = make_job(max_tokens=2_000), make_job()
    gateway.queue = served
    await gateway.begin(stuck)
    gateway.queue = other
    await gateway.enqueue(job)
    async with asyncio.timeout(PROCESS_PATIENCE_SECONDS):
        while (await states(redis, served.model)).get(served.model) is WorkerState.READY:
            await asyncio.sleep(0.01)
    return stuck, job


async def falls_asleep(redis: Redis, name: str) -> None:
    """Wait until the worker of a model sleeps."""
    async with asyncio.timeout(PROCESS_PATIENCE_SECONDS):
        while (await states(redis, name)).get(name) is not WorkerState.SLEEPING:
            await asyncio.sleep(0.02)


def processes(host: int, *names: str) -> dict[str, int]:
    """Return the process of each model's worker that a host's process has."""
    found: dict[str, int] = {}
    for pid in children(host):
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        found |= {
            name: pid for name in names if f"SLUICE_MODEL_NAME={name}".encode() in environment
        }
    return found


async def test_host_swaps_and_a_job_resumes_after_two_swaps(
    redis: Redis, redis_server: RedisServer, gateway: Gateway, tmp_path: Path
) -> None:
    one, two = JobQueue(redis, "one"), JobQueue(redis, "two")
    async with host_process(redis_server, tmp_path, "one", "two") as process:
        # Each model is started once, so that gateways know it.
        await serves(one)
        await serves(two)
        assert set(await redis.hkeys(keys.MODELS)) == {b"one", b"two"}
        long, short = make_job(max_tokens=2_000), make_job()
        gateway.queue = two
        await gateway.begin(long)
        gateway.queue = one
        await gateway.enqueue(short)
        await gateway.finished(short, seconds=PROCESS_PATIENCE_SECONDS)
        (returned,) = gateway.returned(long)
        assert returned.reason is ReturnReason.DRAINING
        assert not (await two.status()).ready_workers
        later = make_job()
        gateway.queue = two
        await gateway.enqueue(later)
        await gateway.finished(later, seconds=PROCESS_PATIENCE_SECONDS)
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(PROCESS_PATIENCE_SECONDS):
            assert await process.wait() == 0
        assert not (await two.status()).ready_workers


async def test_worker_ends_when_its_engine_dies_or_its_host_is_killed(
    redis: Redis, redis_server: RedisServer, gateway: Gateway, tmp_path: Path
) -> None:
    gateway.queue = queue = JobQueue(redis, "orphan")
    async with host_process(redis_server, tmp_path, "orphan") as process:
        await serves(queue)
        (first,) = children(process.pid)
        os.kill(first, signal.SIGUSR1)
        await ends(first)
        await serves(queue)
        (worker,) = children(process.pid)
        job = make_job(max_tokens=2_000)
        await gateway.begin(job)
        process.kill()
        await gateway.read_until(lambda: gateway.returned(job))
        assert gateway.returned(job)[0].reason is ReturnReason.DRAINING
        await ends(worker)


@pytest.mark.slow
async def test_workers_sleep_within_the_bound_and_a_job_resumes_in_the_same_process(
    redis: Redis, redis_server: RedisServer, gateway: Gateway, tmp_path: Path
) -> None:
    names = ("one", "two", "three")
    one, two, three = (JobQueue(redis, name) for name in names)
    async with host_process(redis_server, tmp_path, *names, sleeping=1) as host:
        await serves(three)
        # The first one had to end for the second one.
        assert set(before := processes(host.pid, *names)) == {"two", "three"}
        long, short = make_job(max_tokens=400), make_job()
        gateway.queue = three
        await gateway.begin(long)
        gateway.queue = two
        await gateway.enqueue(short)
        await gateway.finished(short, seconds=PROCESS_PATIENCE_SECONDS)
        (returned,) = gateway.returned(long)
        assert returned.reason is ReturnReason.DRAINING
        await falls_asleep(redis, "three")
        # To gateways, the model has no worker, and one is started for its jobs.
        assert not (await three.status()).ready_workers
        known: Any = await redis.hget(keys.MODELS, "three")
        assert messages.decode_card(known).state is WorkerState.READY
        assert not await three.gone_workers()
        again = resumed(gateway, long)
        assert await three.requeue(again, 1, is_returned=True) is RequeueResult.REQUEUED
        await gateway.finished(long, seconds=PROCESS_PATIENCE_SECONDS)
        assert len(gateway.token_ids(long)) == 400
        assert await states(redis, *names) == {
            "two": WorkerState.SLEEPING,
            "three": WorkerState.READY,
        }
        assert processes(host.pid, *names) == before
        host.send_signal(signal.SIGTERM)
        async with asyncio.timeout(PROCESS_PATIENCE_SECONDS):
            assert await host.wait() == 0
        assert not any(map(is_alive, before.values()))
        assert await states(redis, *names) == {}
        assert not (await one.status()).ready_workers


@pytest.mark.slow
async def test_host_survives_failed_starts_and_cards_that_it_cannot_decode(
    redis: Redis, redis_server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = write_models(tmp_path, "bad", "good")
    await redis.hset(keys.MODELS, "bad", b"\xc1")
    faults = {"start": RuntimeError("a bug"), "stop": OSError("no process")}

    def failing_once(name: str) -> Any:
        original = getattr(HostedWorker, name)

        async def fail_once(*arguments: Any, **options: Any) -> Any:
            if error := faults.pop(name, None):
                raise error
            return await original(*arguments, **options)

        return fail_once

    for name in faults:
        monkeypatch.setattr(HostedWorker, name, failing_once(name))
    settings = HostSettings(models=models, redis_url=SecretStr(redis_server.url), least_seconds=0.5)
    host = Host(settings, read_models(models), redis)
    running = asyncio.create_task(host.run())
    # The first start fails, and then the end of the other model's worker.
    await serves(JobQueue(redis, "good"))
    await serves(JobQueue(redis, "bad"))
    assert not faults
    assert await states(redis, "good") == {}
    async with asyncio.timeout(PROCESS_PATIENCE_SECONDS):
        while await redis.exists(keys.host_start("bad"), keys.host_start("good")):
            await asyncio.sleep(0.02)
    assert not running.done()
    host._on_signal()
    assert await running == 0


@pytest.mark.slow
async def test_host_survives_workers_that_die_asleep_or_before(
    redis: Redis, redis_server: RedisServer, gateway: Gateway, tmp_path: Path
) -> None:
    names = ("early", "late")
    early, late = (JobQueue(redis, name) for name in names)
    # What a worker leaves whose first start fails.
    left = WorkerCard("gone", "late", WorkerState.LOADING, "scripted", 0, 1, scales_to_zero=True)
    await redis.hset(keys.MODELS, "late", messages.encode(left))
    async with host_process(redis_server, tmp_path, *names, sleeping=1) as host:
        await serves(late)
        first = processes(host.pid, *names)
        # The engine of a sleeping worker dies.
        os.kill(first["early"], signal.SIGUSR1)
        await ends(first["early"])
        # The other worker is killed while it drains, or just after.
        _, job = await swap_begins(redis, gateway, late, early)
        os.kill(first["late"], signal.SIGKILL)
        await gateway.finished(job, seconds=PROCESS_PATIENCE_SECONDS)
        second = processes(host.pid, *names)
        assert set(second) == {"early"}
        assert second["early"] != first["early"]
        later = make_job()
        gateway.queue = late
        await gateway.enqueue(later)
        await gateway.finished(later, seconds=PROCESS_PATIENCE_SECONDS)
        await falls_asleep(redis, "early")
        workers = processes(host.pid, *names)
        # The host is killed in a swap, from a worker that drains to one that sleeps.
        stuck, job = await swap_begins(redis, gateway, late, early)
        host.kill()
        for worker in workers.values():
            await ends(worker)
        assert not (await early.status()).ready_workers
    async with host_process(redis_server, tmp_path, *names):
        await gateway.finished(job, seconds=PROCESS_PATIENCE_SECONDS)
    (returned,) = gateway.returned(stuck)
    assert returned.reason is ReturnReason.DRAINING


async def test_host_kills_workers_that_hang_in_a_swap(
    redis: Redis,
    redis_server: RedisServer,
    gateway: Gateway,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A worker that is only slow, on a busy machine, must not be killed.
    monkeypatch.setattr(hosted, "SPARE_SECONDS", 3.0)
    names = ("first", "second")
    models = write_models(tmp_path, *names, stall_seconds=1.0)
    settings = HostSettings(
        models=models,
        redis_url=SecretStr(redis_server.url),
        least_seconds=0.5,
        sleeping_models=1,
    )
    host = Host(settings, read_models(models), redis)
    running = asyncio.create_task(host.run())
    try:
        await serves(JobQueue(redis, "second"))
        before = processes(os.getpid(), *names)
        # One hangs while it wakes up, and then its successor while it should fall asleep.
        for hanging, wanted in (("first", "first"), ("first", "second")):
            pid = processes(os.getpid(), hanging)[hanging]
            os.kill(pid, signal.SIGSTOP)
            gateway.queue, job = JobQueue(redis, wanted), make_job()
            await gateway.enqueue(job)
            await gateway.finished(job, seconds=PROCESS_PATIENCE_SECONDS)
            await ends(pid)
        assert processes(os.getpid(), "second") == {"second": before["second"]}
    finally:
        host._on_signal()
        assert await running == 0
