"""Batch jobs give way to requests, and resume token by token."""

import asyncio
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from redis.asyncio import Redis
from typing_extensions import override

from contract import keys
from contract.messages import (
    GenerationJob,
    JobFinished,
    JobPreempted,
    JobReturned,
    ReturnReason,
)
from contract.queue import RequeueResult
from contract.sampling import SamplingSpec
from contract.tier import Lane, ServiceTier
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
from tests.worker.test_runner import running, until
from worker.engine.base import EngineRequest
from worker.engine.scripted import Script, ScriptedEngine
from worker.engine.vllm.batch_hold import MOST_HELD_STEPS, BatchHold
from worker.execution import claims, sequence
from worker.queue.doorbells import Doorbells

FOUR = Script(step_seconds=0.002, max_sequences=4)


def batch_job(**changes: Any) -> GenerationJob:
    return make_job(service_tier=ServiceTier.BATCH, **changes)


def reached(engine: ScriptedEngine, number: int) -> bool:
    return running(engine) == number


async def requeue(gateway: Gateway, *jobs: GenerationJob) -> None:
    """Wait for the return of jobs, and requeue them as their gateway does."""
    await gateway.read_until(lambda: all(gateway.returned(job) for job in jobs))
    for job in jobs:
        [returned] = gateway.returned(job)
        sent = len(gateway.token_ids(job))
        assert returned == JobReturned(job.handle, 1, ReturnReason.PREEMPTED, True)
        assert gateway.preempted(job) == [JobPreempted(job.handle, 1, 1, sent)]
        result = await gateway.queue.requeue(resumed(gateway, job), 1, is_returned=True)
        assert result is RequeueResult.REQUEUED


async def begin_in_turn(gateway: Gateway, engine: Stepwise, jobs: list[GenerationJob]) -> None:
    """Enqueue jobs for an empty engine, each after the first token of the one before."""
    for number, job in enumerate(jobs, 1):
        await gateway.enqueue(job)
        await until(partial(reached, engine, number))
        engine.allow(2)
        await gateway.read_until(partial(gateway.deltas, job))


def check_alike(
    gateway: Gateway, jobs: list[GenerationJob], undisturbed: list[GenerationJob]
) -> None:
    for job, other in zip(jobs, undisturbed, strict=True):
        for choice in range(job.n):
            assert gateway.token_ids(job, choice) == gateway.token_ids(other, choice)
            assert gateway.text(job, choice) == gateway.text(other, choice)


async def served(gateway: Gateway, *jobs: GenerationJob) -> None:
    """Read until jobs have finished, and requeue them whenever they return."""
    while not {job.handle for job in jobs} <= gateway.ended_handles():
        await gateway.read()
        for job in jobs:
            for returned in gateway.returned(job)[-1:]:
                await gateway.queue.requeue(
                    resumed(gateway, job), returned.attempt, is_returned=True
                )


async def test_requests_replace_the_youngest_batch_jobs_which_resume_exactly(
    redis_server: RedisServer, gateway: Gateway
) -> None:
    lines = [batch_job(max_tokens=40, seed=seed) for seed in range(4)]
    alike = [make_job(max_tokens=40, sampling=line.sampling) for line in lines]
    async with running_worker(redis_server, FOUR, engine_type=Stepwise) as (_, engine, _):
        assert isinstance(engine, Stepwise)
        await begin_in_turn(gateway, engine, lines)
        requests = [make_job(max_tokens=4) for _ in range(2)]
        await gateway.enqueue(*requests)
        await requeue(gateway, *lines[2:])
        assert not gateway.returned(lines[0])
        assert not gateway.returned(lines[1])
        engine.allow()
        await gateway.finished(*requests, *lines)
        assert engine.most <= 4
        await gateway.enqueue(*alike)
        await gateway.finished(*alike)
    check_alike(gateway, lines, alike)
    assert {gateway.end(line).attempt for line in lines[2:]} == {2}


@pytest.mark.parametrize(("share", "replaced"), [(0.0, 0), (0.0001, 1)], ids=["off", "slow"])
async def test_preemption_is_bounded(
    redis_server: RedisServer, gateway: Gateway, share: float, replaced: int
) -> None:
    lines = [batch_job(max_tokens=ENDLESS) for _ in range(4)]
    requests = [make_job(max_tokens=1) for _ in range(3)]
    worker = running_worker(redis_server, FOUR, preempted_share=share)
    async with worker as (_, engine, _):
        await gateway.begin(*lines)
        await gateway.enqueue(*requests)
        await gateway.finished(*requests[:replaced])
        # The first request has the room of the only batch job that may be replaced; the others
        # follow it there.
        if replaced:
            await gateway.finished(*requests)
        assert running(engine) == 4 - replaced
        await gateway.read()
    reasons = [each.reason for line in lines for each in gateway.returned(line)]
    assert reasons.count(ReturnReason.PREEMPTED) == replaced
    assert len(gateway.ended_handles()) == (3 if replaced else 0)


@pytest.mark.parametrize(
    ("requests", "beside"), [(0, 7), (2, 4), (3, 3)], ids=["least", "as-much", "most"]
)
async def test_batch_jobs_leave_as_much_room_as_requests_use(
    redis_server: RedisServer, gateway: Gateway, requests: int, beside: int
) -> None:
    earlier = [make_job(max_tokens=ENDLESS) for _ in range(requests)]
    lines = [batch_job(max_tokens=ENDLESS) for _ in range(8)]
    later = [make_job(max_tokens=1) for _ in range(8 - requests - beside)]
    eight = Script(step_seconds=0.002, max_sequences=8)
    async with running_worker(redis_server, eight) as (_, engine, _):
        for request in earlier:
            await gateway.begin(request)
        await gateway.enqueue(*lines)
        # Not by their deltas: on failure there would be too many to read.
        await until(partial(reached, engine, requests + beside))
        await gateway.enqueue(*later)
        await gateway.finished(*later)
        assert running(engine) == requests + beside
        await gateway.read()
        assert not any(gateway.returned(line) for line in lines)


async def test_the_engine_processes_one_batch_prompt_at_once_beside_requests(
    redis_server: RedisServer, gateway: Gateway
) -> None:
    # The engine processes 64 prompt tokens at once beside a request, and otherwise 2,048.
    lines = [batch_job(max_tokens=1, prompt_token_ids=[300] * 100) for _ in range(6)]
    request = make_job(max_tokens=ENDLESS)
    eight = Script(step_seconds=0.002, max_sequences=8)
    async with running_worker(redis_server, eight, engine_type=Stepwise) as (_, engine, _):
        assert isinstance(engine, Stepwise)
        await gateway.enqueue(*lines[:3])
        await until(partial(reached, engine, 3))
        engine.allow(1)
        await gateway.finished(*lines[:3])
        await gateway.enqueue(request)
        await until(partial(reached, engine, 1))
        await gateway.enqueue(*lines[3:])
        for ended in range(4, 7):
            await until(partial(reached, engine, 2))
            engine.allow(1)
            await gateway.finished(*lines[:ended])


async def test_batch_jobs_also_give_up_their_kv_cache(
    redis_server: RedisServer, gateway: Gateway
) -> None:
    lines = [batch_job(max_tokens=100, prompt_token_ids=[300] * 200) for _ in range(3)]
    request = make_job(max_tokens=100, prompt_token_ids=[300] * 400)
    async with running_worker(redis_server, Script(step_seconds=0.005, kv_cache_tokens=1000)):
        await gateway.begin(*lines)
        await gateway.enqueue(request)
        await requeue(gateway, *lines[1:])
        await gateway.finished(request, *lines)
    assert [len(gateway.token_ids(each)) for each in (request, *lines)] == [100] * 4
    assert not gateway.returned(lines[0])


async def test_tenant_gives_up_no_more_kv_cache_than_a_job_needs(
    redis_server: RedisServer, gateway: Gateway
) -> None:
    flood = [make_job(max_tokens=100, prompt_token_ids=[300] * 200) for _ in range(3)]
    other = make_job(tenant="other", max_tokens=10, prompt_token_ids=[300] * 280)
    script = Script(step_seconds=0.002, kv_cache_tokens=1000)
    async with running_worker(redis_server, script, engine_type=Stepwise) as (runner, engine, _):
        assert isinstance(engine, Stepwise)
        await begin_in_turn(gateway, engine, flood)
        # The engine makes no step, and so reports nothing, until the job has its room.
        await gateway.enqueue(other)
        await until(lambda: other.id in runner._jobs.by_id)
        assert {*runner._jobs.by_id} == {flood[0].id, flood[1].id, other.id}
        engine.allow()
        await served(gateway, other, *flood)


async def test_tenant_that_uses_less_replaces_the_youngest_work_of_another(
    redis_server: RedisServer, gateway: Gateway
) -> None:
    flood = [make_job(max_tokens=90, seed=seed) for seed in range(4)]
    alike = [make_job(max_tokens=90, sampling=each.sampling) for each in flood]
    half = [make_job(tenant="half", max_tokens=90) for _ in range(3)]
    third = make_job(tenant="third", max_tokens=90)
    async with running_worker(redis_server, FOUR, engine_type=Stepwise) as (_, engine, _):
        assert isinstance(engine, Stepwise)
        await begin_in_turn(gateway, engine, flood)
        # The engine is full. A tenant gets half of it at once, and its next job waits.
        for number, job in enumerate(half[:2], 1):
            await gateway.enqueue(job)
            await requeue(gateway, flood[-number])
        await gateway.enqueue(half[2])
        # The waiting job is not in the way of a third tenant.
        await gateway.enqueue(third)
        await gateway.read_until(lambda: any(map(gateway.returned, [*flood[:2], *half])))
        assert not gateway.returned(half[2])
        engine.allow()
        await served(gateway, third, *half, *flood)
        assert engine.most <= 4
        await gateway.enqueue(*alike)
        await gateway.finished(*alike)
    check_alike(gateway, flood, alike)


@pytest.mark.parametrize("parameters", [{}, {"logprobs": 2}, {"best_of": 9, "n": 2}], ids=str)
async def test_job_with_many_sequences_gives_them_up_one_by_one(
    redis_server: RedisServer, gateway: Gateway, parameters: dict[str, Any]
) -> None:
    many = {"n": 9, "best_of": 9, "max_tokens": 90, **parameters}
    group = make_job(**many)
    undisturbed = make_job(**many, sampling=group.sampling)
    others = [make_job(tenant=f"other-{number}", max_tokens=30) for number in range(3)]
    async with running_worker(redis_server, FOUR, engine_type=Stepwise) as (_, engine, _):
        assert isinstance(engine, Stepwise)
        await gateway.enqueue(group)
        await until(partial(reached, engine, 4))
        engine.allow(70)
        await until(lambda: engine.is_held)
        await gateway.enqueue(*others)
        engine.allow()
        await gateway.finished(*others, group)
        assert engine.most <= 4
        await gateway.enqueue(undisturbed)
        await gateway.finished(undisturbed)
    assert not gateway.returned(group)
    check_alike(gateway, [group], [undisturbed])
    first, second = (gateway.end(each) for each in (group, undisturbed))
    assert isinstance(first, JobFinished)
    assert isinstance(second, JobFinished)
    assert first.completion_tokens == second.completion_tokens
    preempted = gateway.preempted(group)
    assert sum(each.sequences for each in preempted) > 0
    assert all(each.recomputed_tokens >= each.sequences for each in preempted)
    assert not gateway.preempted(undisturbed)
    assert first.chosen == second.chosen


HALF: dict[str, Any] = {"tenant": "half", "model_share": 50}


async def test_tenant_at_its_model_share_waits_and_is_not_in_the_way_of_others(
    redis_server: RedisServer, gateway: Gateway
) -> None:
    half = [make_job(**HALF, max_tokens=9) for _ in range(3)]
    other = [make_job(tenant="other", max_tokens=9) for _ in range(2)]
    line = batch_job(max_tokens=9)
    async with running_worker(redis_server, FOUR, engine_type=Stepwise) as (runner, engine, _):
        assert isinstance(engine, Stepwise)
        await gateway.enqueue(*half)
        await until(partial(reached, engine, 2))
        for number, job in enumerate([*other, line], 3):
            await gateway.enqueue(job)
            await until(partial(reached, engine, min(number, 4)))
        assert {each.id for each in [*half[:2], *other]} == {*runner._jobs.by_id}
        assert (await gateway.queue.status()).waiting_jobs == 1
        engine.allow()
        await gateway.finished(*half, *other, line)


@pytest.mark.parametrize("number", [4, 3], ids=["larger", "beside"])
async def test_group_runs_with_as_many_sequences_as_its_share_allows(
    redis_server: RedisServer, gateway: Gateway, number: int
) -> None:
    # A group waits for the whole share if it is larger, and so does a job that is next to it.
    group = make_job(**HALF, n=number, best_of=number, max_tokens=30)
    after = make_job(**HALF, max_tokens=3)
    async with running_worker(redis_server, FOUR, engine_type=Stepwise) as (_, engine, _):
        assert isinstance(engine, Stepwise)
        await gateway.enqueue(group, after)
        await until(partial(reached, engine, 2))
        engine.allow()
        await gateway.finished(group, after)
        assert engine.most == 2
    assert [len(gateway.token_ids(group, choice)) for choice in range(number)] == [30] * number


@pytest.mark.parametrize("n", [1, 2], ids=["jobs", "group"])
async def test_tenant_that_grows_beyond_its_share_of_the_cache_gives_up_its_youngest_sequence(
    redis_server: RedisServer, gateway: Gateway, monkeypatch: pytest.MonkeyPatch, n: int
) -> None:
    monkeypatch.setattr(claims, "FRESH_SECONDS", 0.02)
    jobs = [make_job(**HALF, max_tokens=400, n=n, best_of=n) for _ in range(2 // n)]
    # Both sequences fit with the tokens that are kept for them, 256 for each, and not with 300.
    script = Script(
        step_seconds=0.001, kv_cache_tokens=2 * (len(jobs[0].prompt_token_ids) * 2 + 580)
    )
    async with running_worker(redis_server, script, engine_type=Stepwise) as (_, engine, _):
        assert isinstance(engine, Stepwise)
        await gateway.enqueue(*jobs)
        await until(partial(reached, engine, 2))
        engine.allow(300)
        await until(partial(reached, engine, 1))
        engine.allow()
        await served(gateway, *jobs)
        assert engine.most == 2
    for job in jobs:
        assert [len(gateway.token_ids(job, choice)) for choice in range(n)] == [400] * n
    assert not gateway.returned(jobs[0])


class SlowAgain(Stepwise):
    """Takes sequences that return to it only when a test allows it."""

    def __init__(self, folder: Path, script: Script) -> None:
        super().__init__(folder, script)
        self.may_return = asyncio.Event()
        self.is_returning = asyncio.Event()

    @override
    async def submit(self, requests: Sequence[EngineRequest]) -> None:
        if any(request.output_token_ids for request in requests):
            self.is_returning.set()
            await self.may_return.wait()
        await super().submit(requests)


async def test_large_jobs_leave_seats_to_the_jobs_that_are_claimed_with_them(
    redis_server: RedisServer, gateway: Gateway
) -> None:
    groups = [make_job(tenant="large", n=4, max_tokens=ENDLESS) for _ in range(2)]
    small = make_job(tenant="small", max_tokens=3)
    await gateway.enqueue(*groups, small)
    async with running_worker(redis_server, FOUR) as (_, engine, _):
        await gateway.finished(small)
        await until(partial(reached, engine, 4))
        await gateway.read_until(lambda: all(gateway.token_ids(each) for each in groups))
        await until(lambda: not engine._waiting)


async def test_sequence_that_is_parked_while_it_returns_is_not_left_in_the_engine(
    redis_server: RedisServer, gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sequence, "SAFE_TOKENS", (0,))
    bans = SamplingSpec(seed=1, bad_words=["zzz"])  # So that submission runs in the background.
    group = make_job(n=4, max_tokens=ENDLESS, sampling=bans)
    first, second = (make_job(tenant=name, max_tokens=3) for name in ("first", "second"))
    async with running_worker(redis_server, FOUR, engine_type=SlowAgain) as (runner, engine, _):
        assert isinstance(engine, SlowAgain)

        def in_engine() -> set[str]:
            return {*engine._running, *(each.request.id for each in engine._waiting)}

        def has(job: GenerationJob) -> bool:
            running = map(runner._jobs.by_sequence.get, in_engine())
            return any(each is not None and each.job.id == job.id for each in running)

        await gateway.enqueue(group)
        await until(partial(reached, engine, 4))
        engine.allow(2)
        await until(lambda: engine.is_held)
        await gateway.enqueue(first)
        await until(partial(has, first))
        engine.allow(5)
        await gateway.finished(first)
        await engine.is_returning.wait()
        await gateway.enqueue(second)
        await until(partial(has, second))
        engine.may_return.set()
        engine.allow(10)
        await gateway.finished(second)
        await until(lambda: in_engine() <= {*runner._jobs.by_sequence})


async def test_an_interrupted_wait_keeps_its_ring(redis: Redis) -> None:
    doorbells = Doorbells(redis, MODEL, "w1", timeout_seconds=PATIENCE_SECONDS)
    event = asyncio.Event()
    event.set()
    assert not await doorbells.wait(Lane, event)
    # No other command may take the token, and no lane is awaited twice.
    assert not await doorbells.wait(Lane, event)
    async with asyncio.timeout(PATIENCE_SECONDS):
        while (await redis.info("clients"))["blocked_clients"] < 2:
            await asyncio.sleep(0.005)
    await asyncio.sleep(0.05)  # A third would arrive now.
    assert (await redis.info("clients"))["blocked_clients"] == 2
    await redis.rpush(keys.doorbell(MODEL, Lane.BATCH), 1)
    async with asyncio.timeout(PATIENCE_SECONDS):
        assert await doorbells.wait([Lane.REQUESTS])
    await doorbells.aclose()


class Waiting(list[Any]):
    """The part of vLLM's queue that a hold uses."""

    def remove_requests(self, some: list[Any]) -> None:
        self[:] = [each for each in self if each not in some]

    add_request = list.append


def test_batch_progresses_though_it_is_left_out_for_requests() -> None:
    def sequence(priority: int, *, is_prompt: bool = False, constraint: Any = None) -> Any:
        return SimpleNamespace(
            priority=priority,
            is_prefill_chunk=is_prompt,
            next_decode_eligible_step=0,
            structured_output_request=constraint,
        )

    hold, batch, decoding = BatchHold(), sequence(1), sequence(0)
    scheduler = SimpleNamespace(
        current_step=0, waiting=Waiting(), running=[batch, decoding], max_num_running_reqs=4
    )

    def step(*, begins: bool = True) -> bool:
        """Return whether batch jobs take part in the next step."""
        with hold.of_next_step(scheduler):
            scheduler.current_step += 1
            waits = [each for each in scheduler.waiting if each.priority]
            assert decoding.next_decode_eligible_step == 0
            takes_part: bool = scheduler.current_step >= batch.next_decode_eligible_step
            assert takes_part or not waits
            if begins and not waits:
                scheduler.waiting.clear()
        return takes_part

    scheduler.waiting[:] = [sequence(1)]
    assert step(), "no request has a prompt"
    scheduler.waiting[:] = [sequence(0, constraint=SimpleNamespace(grammar=None)), sequence(1)]
    assert step(), "the request's grammar is being compiled"
    held = []
    for _ in range(2 * MOST_HELD_STEPS + 2):
        scheduler.waiting[:] = [sequence(0), sequence(1)]
        held.append(step())
        assert scheduler.waiting[-1].priority == 1
    assert held == [*[False] * MOST_HELD_STEPS, True] * 2
    scheduler.waiting[:] = [sequence(0)]
    assert [step(begins=False) for _ in range(3)] == [False, True, True]
    scheduler.waiting.clear()
    assert step()
    scheduler.running.append(sequence(0, is_prompt=True))
    assert not step(), "the rest of a long prompt is processed"
    scheduler.running[-1:] = [sequence(0) for _ in range(3)]
    left_out = [*[False] * (MOST_HELD_STEPS - 1), True]
    assert [step() for _ in left_out] == left_out, "requests use most of the sequences"
    scheduler.waiting[:] = [sequence(0)]
    assert [step(begins=False) for _ in range(3)] == [False, True, True]
