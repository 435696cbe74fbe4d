"""Jobs of a dead engine enter the next one by one, which identifies the deadly job."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
from redis.asyncio import Redis
from typing_extensions import override

from contract.messages import GenerationJob, JobFinished, ReturnReason
from tests.support.patience import PATIENCE_SECONDS
from tests.support.redis_server import RedisServer
from tests.worker.conftest import ENDLESS, Gateway, make_job, running_worker
from worker.engine.base import EngineDeadError, EngineRequest, EngineStep
from worker.engine.scripted import Script, ScriptedEngine

DEADLY = 777


class Watching(ScriptedEngine):
    """Counts concurrent suspects of which no sequence has a token."""

    def __init__(self, folder: Path, script: Script) -> None:
        super().__init__(folder, script)
        self.fresh: dict[str, str] = {}
        self.most = 0
        self.order: list[str] = []
        self.may_step = asyncio.Event()
        self.may_step.set()

    @override
    async def submit(self, requests: Sequence[EngineRequest]) -> None:
        for request in requests:
            self.order.append(request.cache_salt)
            if request.cache_salt.startswith("suspect"):
                self.fresh[request.id] = request.cache_salt
        self.most = max(self.most, len(set(self.fresh.values())))
        await super().submit(requests)

    @override
    async def step(self) -> EngineStep:
        await self.may_step.wait()
        step = await super().step()
        begun = {self.fresh.get(output.sequence_id) for output in step.outputs}
        self.fresh = {key: salt for key, salt in self.fresh.items() if salt not in begun}
        return step

    @override
    async def abort(self, sequence_ids: Sequence[str]) -> None:
        for sequence_id in sequence_ids:
            self.fresh.pop(sequence_id, None)
        await super().abort(sequence_ids)


def suspect(number: int, **changes: object) -> GenerationJob:
    return make_job(is_suspect=True, cache_salt=f"suspect-{number}", **changes)


async def test_suspects_wait_for_each_others_first_token(
    redis_server: RedisServer, gateway: Gateway
) -> None:
    suspects = [suspect(number, max_tokens=20, n=2) for number in range(6)]
    others = [make_job(cache_salt="other", max_tokens=80) for _ in range(6)]
    # The engine makes steps for others while a suspect's prompt is read.
    script = Script(step_seconds=0.01, prefill_seconds_per_token=0.03)
    async with running_worker(redis_server, script, engine_type=Watching) as (_, engine, _):
        assert isinstance(engine, Watching)
        engine.may_step.clear()
        await gateway.enqueue(*suspects, *others)
        async with asyncio.timeout(PATIENCE_SECONDS):
            while engine.order.count("other") < len(others):
                await asyncio.sleep(0.01)
        assert "suspect-1" not in engine.order, "only others do not wait"
        engine.may_step.set()
        await gateway.finished(*suspects, *others)
    assert engine.most == 1
    for job in suspects:
        assert isinstance(gateway.end(job), JobFinished)
        assert len(gateway.token_ids(job, 1)) == 20


async def test_suspect_that_ends_without_a_token_admits_the_next_one(
    redis: Redis, redis_server: RedisServer, gateway: Gateway
) -> None:
    first, second, third = (suspect(number) for number in range(3))
    async with running_worker(redis_server, Script(), engine_type=Watching) as (_, engine, _):
        assert isinstance(engine, Watching)
        engine.may_step.clear()
        await gateway.enqueue(first, second, third)
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not engine.order:
                await asyncio.sleep(0.01)
        assert await gateway.queue.cancel(second.id, second.tenant)
        assert await gateway.queue.cancel(first.id, first.tenant)
        async with asyncio.timeout(PATIENCE_SECONDS):
            while engine.order != ["suspect-0", "suspect-2"]:
                await asyncio.sleep(0.01)
        engine.may_step.set()
        await gateway.finished(third)
    assert engine.most == 1


async def test_only_jobs_in_the_engine_are_blamed_for_its_death(
    redis_server: RedisServer, gateway: Gateway
) -> None:
    deadly = suspect(0, prompt_token_ids=[300, DEADLY])
    waiting = suspect(1)
    running = make_job(max_tokens=ENDLESS)
    script = Script(step_seconds=0.01, deadly_token_id=DEADLY, prefill_seconds_per_token=0.2)
    async with running_worker(redis_server, script, engine_type=Watching) as started:
        runner, engine, task = started
        assert isinstance(engine, Watching)
        await gateway.begin(running)
        engine.may_step.clear()
        await gateway.enqueue(deadly, waiting)
        async with asyncio.timeout(PATIENCE_SECONDS):
            while waiting.id not in runner._jobs.by_id or "suspect-0" not in engine.order:
                await asyncio.sleep(0.01)
        engine.may_step.set()
        with pytest.raises(EngineDeadError):
            await asyncio.wait_for(task, PATIENCE_SECONDS)
    jobs = (running, deadly, waiting)
    await gateway.read_until(lambda: all(gateway.returned(job) for job in jobs))
    reported = [
        (gateway.returned(job)[0].reason, gateway.returned(job)[0].has_progressed) for job in jobs
    ]
    assert reported == [
        (ReturnReason.ENGINE_DIED, True),
        (ReturnReason.ENGINE_DIED, False),
        (ReturnReason.DRAINING, False),
    ]
