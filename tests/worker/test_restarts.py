"""An engine that dies or hangs is replaced in the same process."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY
from pydantic import SecretStr
from redis.asyncio import Redis
from typing_extensions import override

from contract import keys, messages
from contract.messages import JobFinished, JobReturned, ReturnReason, WorkerCard, WorkerState
from contract.queue import RequeueResult
from tests.support.patience import PATIENCE_SECONDS
from tests.support.processes import free_port
from tests.support.redis_server import RedisServer
from tests.worker.conftest import (
    ENDLESS,
    MODEL,
    MODEL_FOLDER,
    Gateway,
    make_job,
    resumed,
    running_worker,
)
from tests.worker.test_process import get, ready
from worker.engine.base import Engine, EngineDeadError, EngineRequest, EngineStep
from worker.engine.scripted import Script, ScriptedEngine
from worker.main import EXIT_STOPPED, serve
from worker.registration import Registration
from worker.settings import WorkerSettings
from worker.supervisor import EngineSupervisor

STEADY = Script(step_seconds=0.01)
SLOW = Script(step_seconds=0.05)
"""Jobs of some hundred tokens do not end before their engine does."""


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.supervisor.FIRST_PAUSE_SECONDS", 0.1)


class Hanging(ScriptedEngine):
    """Makes no more steps once a test lets it hang."""

    def __init__(self, folder: Path, script: Script) -> None:
        super().__init__(folder, script)
        self.hangs = False
        self.fails = False
        self.is_closed = False

    @override
    async def step(self) -> EngineStep:
        if self.fails:
            raise RuntimeError("a bug")
        if self.hangs:
            await asyncio.Event().wait()
        return await super().step()

    @override
    async def submit(self, requests: Sequence[EngineRequest]) -> None:
        if self.hangs:
            await asyncio.Event().wait()
        await super().submit(requests)

    @override
    async def abort(self, sequence_ids: Sequence[str]) -> None:
        if self.hangs:
            await asyncio.Event().wait()
        await super().abort(sequence_ids)

    @override
    async def aclose(self) -> None:
        self.is_closed = True
        await super().aclose()


class Factory:
    """Makes engines, the first ones of which may not start."""

    def __init__(self, script: Script = STEADY) -> None:
        self.script = script
        self.made: list[Hanging] = []
        self.broken: set[int] = set()
        self.may_start = asyncio.Event()
        """Until it is set, engines do not start, and the worker reports what it waits for."""
        self.may_start.set()

    def __call__(self) -> Engine:
        engine = Hanging(MODEL_FOLDER, self.script)
        is_broken, start_engine = len(self.made) in self.broken, engine.start

        async def start() -> None:
            if is_broken:
                raise RuntimeError("no memory")
            await self.may_start.wait()
            await start_engine()

        engine.start = start  # type: ignore[method-assign]
        self.made.append(engine)
        return engine


@pytest.fixture(autouse=True)
def unsettled_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep workers from collecting garbage: here each start would visit all objects of pytest."""
    monkeypatch.setattr("worker.main._settle_memory", lambda: None)


@contextlib.asynccontextmanager
async def serving(
    redis_server: RedisServer, factory: Factory, **settings: Any
) -> AsyncIterator["asyncio.Task[int]"]:
    fields = {
        "model_path": str(MODEL_FOLDER),
        "model_name": MODEL,
        "redis_url": SecretStr(redis_server.url),
        "worker_id": "w1",
        "gather_seconds": 0.0,
        "lease_seconds": 60,
        **settings,
    }
    task = asyncio.create_task(serve(WorkerSettings(**fields), factory))
    try:
        yield task
        if not task.done():
            os.kill(os.getpid(), signal.SIGTERM)
            assert await asyncio.wait_for(task, PATIENCE_SECONDS) == EXIT_STOPPED
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def card_of(redis: Redis) -> WorkerCard | None:
    card: Any = await redis.get(keys.worker_card(MODEL, "w1"))
    return None if card is None else messages.decode_card(card)


async def announced(redis: Redis, state: WorkerState) -> WorkerCard:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while (card := await card_of(redis)) is None or card.state is not state:
            await asyncio.sleep(0.01)
    return card


async def returned(gateway: Gateway, job: Any) -> JobReturned:
    await gateway.read_until(lambda: bool(gateway.returned(job)))
    return gateway.returned(job)[-1]


@pytest.mark.parametrize(
    ("how", "reason", "failure"),
    [
        ("dies", ReturnReason.ENGINE_DIED, "The engine died: "),
        ("hangs", ReturnReason.ENGINE_DIED, "The engine died: "),
        ("fails", ReturnReason.DRAINING, "The worker failed: RuntimeError"),
    ],
)
async def test_job_continues_after_an_engine_restart(
    redis: Redis,
    redis_server: RedisServer,
    gateway: Gateway,
    how: str,
    reason: ReturnReason,
    failure: str,
) -> None:
    factory = Factory(SLOW)
    job = make_job(max_tokens=400, seed=9)
    whole = make_job(max_tokens=400, seed=9)
    async with serving(redis_server, factory, stall_seconds=0.5):
        await ready(gateway)
        await gateway.begin(job)
        factory.script = Script()
        factory.may_start.clear()
        if how == "dies":
            factory.made[0].die()
        elif how == "hangs":
            factory.made[0].hangs = True
        else:
            factory.made[0].fails = True
        back = await returned(gateway, job)
        assert (back.reason, back.has_progressed) == (reason, True)
        card = await announced(redis, WorkerState.RESTARTING)
        assert card.engine_restarts == 1
        assert card.last_failure.startswith(failure)
        assert [lost.job_id for lost in await gateway.queue.reclaim()] == [job.id]
        again = resumed(gateway, job)
        requeued = await gateway.queue.requeue(again, 1, is_returned=True)
        assert requeued is RequeueResult.REQUEUED
        factory.may_start.set()
        card = await announced(redis, WorkerState.READY)
        assert card.engine_restarts == 1
        await gateway.enqueue(whole)
        await gateway.finished(job, whole)
    assert factory.made[0].is_closed
    assert gateway.token_ids(job) == gateway.token_ids(whole)
    end = gateway.end(job)
    assert isinstance(end, JobFinished)
    assert end.completion_tokens == 400
    numbers = [frame.number for frame in gateway.frames]
    assert numbers == list(range(1, len(numbers) + 1)), "frames are numbered on"


async def test_announcements_go_on_after_a_bug(
    redis: Redis, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, errors = Registration.announce, [RuntimeError("a bug")]

    async def announce(self: Registration) -> None:
        if errors:
            raise errors.pop()
        await original(self)

    monkeypatch.setattr(Registration, "announce", announce)
    async with serving(redis_server, Factory()):
        await announced(redis, WorkerState.READY)
        # The periodic announcement alone renews the card.
        await redis.delete(keys.worker_card(MODEL, "w1"))
        await announced(redis, WorkerState.READY)
    assert not errors


async def test_engine_is_tried_until_it_starts(
    redis: Redis, redis_server: RedisServer, gateway: Gateway
) -> None:
    factory = Factory()
    factory.broken = {1, 2}
    restarts = REGISTRY.get_sample_value("sluice_worker_engine_restarts_total") or 0
    async with serving(redis_server, factory):
        await ready(gateway)
        factory.may_start.clear()
        factory.made[0].die()
        await announced(redis, WorkerState.RESTARTING)
        async with asyncio.timeout(PATIENCE_SECONDS):
            while (card := await announced(redis, WorkerState.RESTARTING)).last_failure != (
                "The engine could not be started: no memory"
            ):
                await asyncio.sleep(0.01)
        assert (await gateway.queue.status()).ready_workers == 0
        assert REGISTRY.get_sample_value(
            "sluice_worker_state", {"sluice_worker_state": "restarting"}
        )
        factory.may_start.set()
        card = await announced(redis, WorkerState.READY)
        assert card.engine_restarts == 1
        job = make_job()
        await gateway.enqueue(job)
        await gateway.finished(job)
    assert len(factory.made) == 4
    assert REGISTRY.get_sample_value("sluice_worker_engine_restarts_total") == restarts + 1


async def test_pauses_double_until_an_engine_works_steadily(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pauses: list[float] = []
    now = 1000.0

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr("worker.supervisor.asyncio.sleep", sleep)
    monkeypatch.setattr("worker.supervisor.FIRST_PAUSE_SECONDS", 1.0)
    monkeypatch.setattr("worker.supervisor.time.monotonic", lambda: now)
    factory = Factory()
    failures: list[str] = []
    supervisor = EngineSupervisor(
        factory,
        stopping=asyncio.Event(),
        longest_pause_seconds=60.0,
        on_failure=failures.append,
    )
    assert await supervisor.start() is factory.made[0]
    factory.broken = set(range(1, 8))
    await supervisor.restart("gone")
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
    assert failures == ["gone"] + ["The engine could not be started: no memory"] * 7
    assert all(engine.is_closed for engine in factory.made[:-1])
    now += 59
    await supervisor.restart("gone")
    assert pauses[-1] == 60.0
    now += 60
    await supervisor.restart("gone")
    assert pauses[-1] == 1.0
    assert supervisor.down_seconds == 0.0


@pytest.mark.parametrize("when", ["pause", "start"])
async def test_signal_during_a_restart_ends_the_worker_at_once(
    redis: Redis,
    redis_server: RedisServer,
    gateway: Gateway,
    monkeypatch: pytest.MonkeyPatch,
    when: str,
) -> None:
    if when == "pause":
        monkeypatch.setattr("worker.supervisor.FIRST_PAUSE_SECONDS", 60.0)
    factory = Factory()
    async with serving(redis_server, factory) as task:
        await ready(gateway)
        factory.may_start.clear()
        factory.made[0].die()
        await announced(redis, WorkerState.RESTARTING)
        if when == "start":
            async with asyncio.timeout(PATIENCE_SECONDS):
                while len(factory.made) < 2:
                    await asyncio.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)
        # Half of the pause.
        assert await asyncio.wait_for(task, 30) == EXIT_STOPPED
    async with asyncio.timeout(PATIENCE_SECONDS):
        while await card_of(redis) is not None:
            await asyncio.sleep(0.01)


async def test_probes_during_a_restart(
    redis: Redis,
    redis_server: RedisServer,
    gateway: Gateway,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("worker.supervisor.FIRST_PAUSE_SECONDS", 60.0)
    port = free_port()
    factory = Factory()
    async with serving(redis_server, factory, health_port=port, restart_seconds=2.0):
        await ready(gateway)
        assert (await get(port, "/readyz"))[0] == 200
        factory.made[0].die()
        await announced(redis, WorkerState.RESTARTING)
        assert (await get(port, "/readyz"))[0] == 503
        metrics = (await get(port, "/metrics"))[1]
        (line,) = [
            each
            for each in metrics.splitlines()
            if each.startswith("sluice_worker_engine_start_pause_seconds ")
        ]
        assert 30 < float(line.split()[1]) <= 60
        async with asyncio.timeout(PATIENCE_SECONDS):
            while (await get(port, "/healthz"))[0] != 503:
                await asyncio.sleep(0.1)


async def test_idle_and_stepping_engines_do_not_count_as_hanging(
    redis_server: RedisServer, gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The hung engine holds up a claim, for which the worker waits.
    monkeypatch.setattr("worker.execution.runner._RETURN_SECONDS", 0.5)
    job = make_job(max_tokens=150)
    worker = running_worker(redis_server, STEADY, stall_seconds=0.4, engine_type=Hanging)
    async with worker as (_, engine, task):
        assert isinstance(engine, Hanging)
        await asyncio.sleep(0.6)
        await gateway.enqueue(job)
        await gateway.finished(job)
        assert not task.done()
        engine.hangs = True
        stuck = make_job()
        await gateway.enqueue(stuck)
        with pytest.raises(EngineDeadError, match=r"no step for 0\.4 s"):
            await asyncio.wait_for(task, PATIENCE_SECONDS)
        # While a task writes the frames that were not written in time.
        back = await returned(gateway, stuck)
    assert (back.reason, back.has_progressed) == (ReturnReason.ENGINE_DIED, False)


async def test_drain_of_a_hanging_engine_hands_back_in_time(
    redis_server: RedisServer, gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.execution.runner._RETURN_SECONDS", 0.5)
    worker = running_worker(redis_server, STEADY, engine_type=Hanging)
    async with worker as (runner, engine, task):
        assert isinstance(engine, Hanging)
        job, late = make_job(max_tokens=ENDLESS), make_job()
        await gateway.begin(job)
        engine.hangs = True
        await gateway.enqueue(late)
        async with asyncio.timeout(PATIENCE_SECONDS):
            while (await gateway.queue.status()).leased_jobs < 2:
                await asyncio.sleep(0.01)
        await runner.drain(0.2)
        await asyncio.wait_for(task, PATIENCE_SECONDS)
        # While a task writes the frames that were not written in time.
        assert (await returned(gateway, job)).reason is ReturnReason.DRAINING
        assert (await returned(gateway, late)).reason is ReturnReason.DRAINING
