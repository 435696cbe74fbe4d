"""The receipt of a claimed job counts what the engine produced, however the job ends."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from redis.asyncio import Redis
from typing_extensions import override

from common import clock
from contract import keys
from contract.messages import GenerationJob, JobFailed, JobFinished, Resumption, SequenceProgress
from contract.outcomes import JobReceipt, JobState
from contract.queue import LeaseReport, RequeueResult
from contract.sampling import SamplingSpec
from tests.support.patience import PATIENCE_SECONDS
from tests.support.redis_server import RedisServer
from tests.worker.conftest import (
    ENDLESS,
    MODEL,
    Gateway,
    Stepwise,
    make_job,
    resumed,
    running_worker,
)
from worker.engine.base import EngineRequest, EngineStep, SequenceEnd
from worker.engine.scripted import Script, ScriptedEngine
from worker.execution.runner import Runner

STEADY = Script(step_seconds=0.005)
GREEDY = SamplingSpec(seed=1, temperature=0.0)


class Counting(ScriptedEngine):
    """Counts the samples of each job; each job has its own cache salt."""

    def __init__(self, folder: Path, script: Script) -> None:
        super().__init__(folder, script)
        self.sampled: Counter[str] = Counter()
        self._salts: dict[str, str] = {}

    @override
    async def submit(self, requests: Sequence[EngineRequest]) -> None:
        self._salts.update((request.id, request.cache_salt) for request in requests)
        await super().submit(requests)

    @override
    async def step(self) -> EngineStep:
        step = await super().step()
        for output in step.outputs:
            self.sampled[self._salts[output.sequence_id]] += len(output.token_ids)
        return step


class CountingStepwise(Stepwise, Counting):
    """Counts its samples, and makes the steps that a test allows."""


class Caching(Counting):
    """Finds two tokens of every prompt in its cache."""

    @override
    async def step(self) -> EngineStep:
        step = await super().step()
        outputs = [
            msgspec.structs.replace(each, cached_tokens=2) if each.cached_tokens == 0 else each
            for each in step.outputs
        ]
        return step._replace(outputs=outputs)


class GivesUp(Counting):
    """Aborts sequences where they should end for their length, without another sample."""

    @override
    async def step(self) -> EngineStep:
        step = await super().step()
        outputs = []
        for each in step.outputs:
            if each.end is SequenceEnd.LENGTH:
                self.sampled[self._salts[each.sequence_id]] -= 1
                outputs.append(msgspec.structs.replace(each, token_ids=[], end=SequenceEnd.ERROR))
            else:
                outputs.append(each)
        return step._replace(outputs=outputs)


def salted(**changes: Any) -> GenerationJob:
    """Make a job whose cache salt is its id."""
    job = make_job(**changes)
    return msgspec.structs.replace(job, cache_salt=job.id)


class Bench:
    """A worker, its engine, and the receipts of jobs."""

    def __init__(self, runner: Runner, engine: Counting, gateway: Gateway) -> None:
        self.runner = runner
        self.engine = engine
        self.gateway = gateway

    async def receipt(self, job: GenerationJob) -> JobReceipt:
        """Wait until a job has ended, in Redis and in the engine; return its receipt's counts."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while True:
                (receipt,) = await self.gateway.queue.receipts([job.id])
                if receipt.state is JobState.ENDED:
                    assert receipt.engine == self.engine.info.name
                if receipt.state in (JobState.ENDED, JobState.ABSENT):
                    return receipt._replace(engine="")
                await asyncio.sleep(0.005)

    async def sampled(self, job: GenerationJob, tokens: int) -> None:
        """Wait until the engine has sampled a number of tokens of a job."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while self.engine.sampled[job.id] < tokens:
                await asyncio.sleep(0.001)

    async def cancel(self, job: GenerationJob) -> None:
        """Cancel a job."""
        assert await self.gateway.queue.cancel(job.id, job.tenant)


@pytest.fixture
async def run(
    redis_server: RedisServer, gateway: Gateway, eager_renewals: None
) -> AsyncIterator[Callable[..., Any]]:
    """Starts a worker that detects lost leases early; it stops with the test."""
    workers = []

    async def start(
        *jobs: GenerationJob, engine_type: type[Counting] = Counting, script: Script = STEADY
    ) -> Bench:
        context = running_worker(redis_server, script, engine_type=engine_type)
        runner, engine, _ = await context.__aenter__()
        workers.append(context)
        assert isinstance(engine, Counting)
        if jobs:
            await gateway.enqueue(*jobs)
        return Bench(runner, engine, gateway)

    yield start
    for context in workers:
        await context.__aexit__(None, None, None)


@pytest.mark.parametrize(
    ("changes", "factor"),
    [
        ({}, 1),
        ({"n": 3}, 1),
        ({"n": 2, "best_of": 4}, 1),
        ({"n": 3, "sampling": GREEDY}, 3),
        ({"stop": [" the", " a", " of", " and"], "max_tokens": 400, "n": 2}, 1),
    ],
    ids=["one", "n", "best_of", "greedy", "stop"],
)
async def test_finished_job(run: Callable[..., Any], changes: dict[str, Any], factor: int) -> None:
    job = salted(**changes)
    bench = await run(job, engine_type=Caching)
    await bench.gateway.finished(job)
    receipt = await bench.receipt(job)
    end = bench.gateway.end(job)
    assert isinstance(end, JobFinished)
    counts = (end.completion_tokens, end.prompt_tokens, end.cached_tokens)
    assert receipt == JobReceipt(JobState.ENDED, *counts)
    # One greedy sequence serves all choices, and is charged for each of them.
    assert receipt[1:4] == (bench.engine.sampled[job.id] * factor, 3, 2)
    assert receipt.completion_tokens > 0


async def test_job_without_completion_tokens(run: Callable[..., Any]) -> None:
    job = salted(max_tokens=0)
    bench = await run(job)
    assert await bench.receipt(job) == JobReceipt(JobState.ENDED, 0, 3, 0)


@pytest.mark.parametrize(
    ("changes", "factor"),
    [
        ({}, 1),
        ({"n": 3}, 1),
        ({"n": 2, "best_of": 4}, 1),
        ({"n": 3, "sampling": GREEDY}, 3),
        ({"stream": False}, 1),
    ],
    ids=["one", "n", "best_of", "greedy", "whole"],
)
async def test_job_cancelled_while_running(
    run: Callable[..., Any], changes: dict[str, Any], factor: int
) -> None:
    job = salted(max_tokens=ENDLESS, **changes)
    bench = await run(job, engine_type=Caching)
    await bench.sampled(job, 20)
    await bench.cancel(job)
    receipt = await bench.receipt(job)
    assert receipt == JobReceipt(JobState.ENDED, bench.engine.sampled[job.id] * factor, 3, 2)
    assert bench.engine.sampled[job.id] >= 20
    assert (await bench.gateway.queue.status()).leased_jobs == 0
    await bench.gateway.read()
    assert not bench.gateway.ended_handles()


async def test_job_cancelled_while_the_prompt_is_read_counts_it(run: Callable[..., Any]) -> None:
    job = salted()
    bench = await run(job, script=Script(prefill_seconds_per_token=60.0))
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not bench.engine._running:
            await asyncio.sleep(0.005)
    await bench.cancel(job)
    assert await bench.receipt(job) == JobReceipt(JobState.ENDED, 0, 3, 0)


async def test_cancelled_job_whose_worker_missed_the_cancellation(
    run: Callable[..., Any], redis: "Redis"
) -> None:
    job = salted(max_tokens=ENDLESS)
    bench = await run(job)
    await bench.sampled(job, 5)
    # As if the reply with its id from the control list had been lost.
    await redis.hset(keys.job(MODEL, job.id), "cancelled", "1")
    receipt = await bench.receipt(job)
    assert receipt == JobReceipt(JobState.ENDED, bench.engine.sampled[job.id], 3, 0)


async def test_job_whose_deadline_passes(
    run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = salted(max_tokens=ENDLESS, n=2)
    bench = await run(job)
    await bench.sampled(job, 5)
    monkeypatch.setattr(clock, "now_ms", lambda: job.deadline_ms)
    receipt = await bench.receipt(job)
    assert receipt == JobReceipt(JobState.ENDED, bench.engine.sampled[job.id], 3, 0)
    assert receipt.completion_tokens > 0
    await bench.gateway.read()
    assert isinstance(bench.gateway.end(job), JobFailed)


async def test_job_that_is_refused(run: Callable[..., Any]) -> None:
    late, wrong = salted(deadline_ms=clock.now_ms() - 1), salted(prompt_token_ids=[10**6])
    bench = await run(late, wrong)
    for job in (late, wrong):
        assert await bench.receipt(job) == JobReceipt(JobState.ENDED, 0, 0, 0)


async def test_job_that_the_engine_aborts(run: Callable[..., Any]) -> None:
    job = salted(max_tokens=9)
    bench = await run(job, engine_type=GivesUp)
    assert await bench.receipt(job) == JobReceipt(JobState.ENDED, 8, 3, 0)
    assert bench.engine.sampled[job.id] == 8


async def test_job_of_a_gateway_that_dies(
    run: Callable[..., Any], redis: "Redis", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.execution.runner.GRACE_SECONDS", 0.3)
    job, unclaimed = salted(max_tokens=ENDLESS), salted(gateway="dead")
    bench = await run(job, unclaimed)
    assert await bench.receipt(unclaimed) == JobReceipt(JobState.ENDED, 0, 0, 0)
    await bench.sampled(job, 5)
    await redis.delete(keys.gateway_alive("g1"))
    receipt = await bench.receipt(job)
    assert receipt == JobReceipt(JobState.ENDED, bench.engine.sampled[job.id], 3, 0)


async def test_job_that_is_settled_already(run: Callable[..., Any], redis: "Redis") -> None:
    job = salted(max_tokens=ENDLESS)
    bench = await run(job)
    await bench.sampled(job, 5)
    await bench.gateway.queue.forget([job.id])
    await bench.cancel(job)
    assert await bench.receipt(job) == JobReceipt(JobState.ABSENT)
    assert not await redis.exists(keys.job(MODEL, job.id))


async def test_job_claimed_by_another_worker(run: Callable[..., Any], redis: "Redis") -> None:
    job = salted(max_tokens=ENDLESS)
    bench = await run(job)
    await bench.sampled(job, 5)
    await redis.hset(keys.job(MODEL, job.id), mapping={"worker": "another", "completion": "7"})
    async with asyncio.timeout(PATIENCE_SECONDS):
        while bench.engine._running:
            await asyncio.sleep(0.005)
    assert bench.engine.sampled[job.id] < job.max_tokens, "it did not end by itself"
    await asyncio.sleep(0.1)
    (receipt,) = await bench.gateway.queue.receipts([job.id])
    assert (receipt.state, receipt.completion_tokens) == (JobState.RUNNING, 7)
    assert await bench.gateway.queue.finish("another", LeaseReport(job.id, 1, 9, 3, 1))
    assert await bench.receipt(job) == JobReceipt(JobState.ENDED, 9, 3, 1)


async def test_job_that_is_handed_back(run: Callable[..., Any]) -> None:
    running, cancelled = salted(max_tokens=ENDLESS), salted(max_tokens=ENDLESS)
    bench = await run(running, cancelled)
    for job in (running, cancelled):
        await bench.sampled(job, 5)
    await bench.runner.drain(0.0)
    await bench.gateway.lost(running, cancelled)
    await bench.cancel(cancelled)
    receipt = await bench.receipt(cancelled)
    assert receipt == JobReceipt(JobState.ENDED, bench.engine.sampled[cancelled.id], 3, 0)
    await bench.gateway.read()
    again = resumed(bench.gateway, running)
    assert await bench.gateway.queue.requeue(again, 1) is RequeueResult.REQUEUED
    first = bench.engine.sampled[running.id]
    assert first > 0
    second = await run()
    await second.sampled(running, 5)
    await second.cancel(running)
    receipt = await second.receipt(running)
    assert receipt == JobReceipt(JobState.ENDED, first + second.engine.sampled[running.id], 3, 0)


async def test_job_that_ends_before_its_second_attempt_begins(
    run: Callable[..., Any], redis: "Redis"
) -> None:
    progress = Resumption([SequenceProgress([400] * 7)], prompt_tokens=5, cached_tokens=2)
    late = salted(deadline_ms=clock.now_ms() - 1, resumption=progress)
    orphan = salted(gateway="dead", resumption=progress)
    greedy = salted(deadline_ms=0, n=3, sampling=GREEDY, resumption=progress)
    bench = await run(late, orphan, greedy)
    assert await bench.receipt(late) == JobReceipt(JobState.ENDED, 7, 5, 2)
    assert await bench.receipt(orphan) == JobReceipt(JobState.ENDED, 7, 5, 2)
    assert await bench.receipt(greedy) == JobReceipt(JobState.ENDED, 21, 5, 2)


async def test_waiting_end_of_an_old_attempt_does_not_affect_the_new_one(
    run: Callable[..., Any], redis: "Redis", monkeypatch: pytest.MonkeyPatch
) -> None:
    job = salted(max_tokens=ENDLESS)
    bench = await run(job)
    await bench.sampled(job, 5)
    old = LeaseReport(job.id, 1, 5, 3)

    async def not_yet(*_: Any) -> bool:
        raise OSError

    async def renewed() -> None:
        """Wait until the lease has been renewed."""
        end = await redis.zscore(keys.leases(MODEL), job.id)
        async with asyncio.timeout(PATIENCE_SECONDS):
            while await redis.zscore(keys.leases(MODEL), job.id) == end:
                await asyncio.sleep(0.01)

    with monkeypatch.context() as patched:
        patched.setattr(bench.runner.link.queue, "finish", not_yet)
        await redis.hset(keys.job(MODEL, job.id), "attempt", "2")
        generation = bench.runner._jobs.by_id[job.id]
        generation.attempt = 2
        bench.runner.link.leases.end([old])
        # The first renewal may have been sent before.
        for _ in range(3):
            await renewed()
        assert bench.runner._jobs.by_id[job.id] is generation
    await bench.cancel(job)
    receipt = await bench.receipt(job)
    assert receipt == JobReceipt(JobState.ENDED, bench.engine.sampled[job.id], 3, 0)


@pytest.mark.parametrize("seed", range(3))
async def test_receipts_of_cancelled_jobs_add_up_to_the_sampled_tokens(
    run: Callable[..., Any], seed: int
) -> None:
    rng = random.Random(seed)
    jobs = []
    for _ in range(80):
        n = rng.randint(1, 3)
        best_of = n + rng.choice([0, 0, 2])
        jobs.append(salted(n=n, best_of=best_of, max_tokens=rng.randint(1, 60)))
    bench = await run(*jobs, script=Script(max_sequences=40), engine_type=CountingStepwise)
    for job in rng.sample(jobs, 50):
        bench.engine.allow(rng.randint(0, 6))
        async with asyncio.timeout(PATIENCE_SECONDS):
            while bench.engine._running and not bench.engine.is_held:
                await asyncio.sleep(0.001)
        await bench.gateway.queue.cancel(job.id, job.tenant)
    bench.engine.allow()
    receipts = [await bench.receipt(job) for job in jobs]
    reported = {
        job.id: receipt.completion_tokens for job, receipt in zip(jobs, receipts, strict=True)
    }
    assert reported == {job.id: bench.engine.sampled[job.id] for job in jobs}
    states = Counter(receipt.state for receipt in receipts)
    assert states[JobState.ENDED]
    assert states[JobState.ABSENT]
    assert (await bench.gateway.queue.status())[:3] == (0, 0, 0)
