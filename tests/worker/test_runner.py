"""The worker's loops with the scripted engine and a real Redis."""

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from redis.asyncio import Redis
from typing_extensions import override

from common import clock
from common.tasks import end_task
from contract import keys
from contract.messages import (
    ContextExcess,
    Feature,
    GenerationJob,
    JobFailed,
    JobFinished,
    JobReturned,
    JobStarted,
    ReturnReason,
)
from contract.outcomes import FailureCode, FinishReason
from contract.queue import Affinity, ClaimResult, JobQueue, RequeueResult, Room
from contract.sampling import SamplingSpec
from tests.support.patience import PATIENCE_SECONDS
from tests.support.redis_server import RedisServer
from tests.worker.conftest import (
    ENDLESS,
    LEASE_MS,
    MODEL,
    WORKER,
    Gateway,
    Stepwise,
    make_job,
    resumed,
    running_worker,
)
from worker.engine.base import (
    EngineDeadError,
    EngineRequest,
    EngineStep,
    InvalidRequestError,
    SequenceEnd,
)
from worker.engine.scripted import Script, ScriptedEngine
from worker.execution import runner as runner_module
from worker.execution.steps import MANY_OUTPUTS
from worker.queue import doorbells, replies
from worker.queue import link as link_module
from worker.queue.replies import ReplyWriter

STEADY = Script(step_seconds=0.01)
LEASES = keys.leases(MODEL)
ROOM = Room(tokens=10_000, sequences=100, most_sequences=100, empty=True)


async def until(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not condition():
            await asyncio.sleep(0.005)


def running(engine: ScriptedEngine) -> int:
    return len(engine._running) + len(engine._waiting)


async def lost_jobs(gateway: Gateway) -> set[tuple[str, int]]:
    return {(lost.job_id, lost.attempt) for lost in await gateway.queue.reclaim()}


async def handed_back(gateway: Gateway, job: GenerationJob) -> None:
    """Wait until the lease of a job has expired, and no other."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while await lost_jobs(gateway) != {(job.id, 1)}:
            await asyncio.sleep(0.01)


async def nothing_leased(gateway: Gateway) -> None:
    """Wait until no job has a lease."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while (await gateway.queue.status()).leased_jobs:
            await asyncio.sleep(0.01)


async def waiting_for_rings(redis: Redis, number: int) -> None:
    """Wait until a number of clients wait for an entry of a list."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while (await redis.info("clients"))["blocked_clients"] != number:
            await asyncio.sleep(0.005)


async def held_digests(redis: Redis, number: int) -> None:
    """Wait until Redis knows a number of digests that the worker holds."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while await redis.scard(keys.held(MODEL, WORKER)) != number:
            await asyncio.sleep(0.005)


async def test_frames_come_in_order_numbered_and_complete(
    redis_server: RedisServer, gateway: Gateway
) -> None:
    jobs = [make_job(max_tokens=30, n=2) for _ in range(20)]
    async with running_worker(redis_server, STEADY, engine_type=Stepwise) as (_, engine, _):
        assert isinstance(engine, Stepwise)
        await gateway.enqueue(*jobs)
        # Several claims take them.
        await until(lambda: running(engine) == 40)
        engine.allow()
        await gateway.finished(*jobs)
    assert [frame.number for frame in gateway.frames] == list(range(1, len(gateway.frames) + 1))
    assert {frame.worker for frame in gateway.frames} == {WORKER}
    for job in jobs:
        for choice in range(2):
            assert len(gateway.token_ids(job, choice)) == 30
            reasons = [delta.finish_reason for delta in gateway.deltas(job, choice)]
            assert reasons == [None] * (len(reasons) - 1) + [FinishReason.LENGTH]
        end = gateway.end(job)
        assert isinstance(end, JobFinished)
        assert end == JobFinished(
            job.handle,
            1,
            3,
            60,
            0,
            prefill_ms=end.prefill_ms,
            generation_ms=end.generation_ms,
            engine=engine.info.name,
            exactness_class=engine.info.exactness.digest,
            ended_at=end.ended_at,
        )
        assert clock.now_seconds() - PATIENCE_SECONDS < end.ended_at <= clock.now_seconds()
        assert end.generation_ms > end.prefill_ms > 0
    assert len(gateway.frames) < 60, "one frame has all sequences of a step"


async def test_first_token_is_sent_before_the_text_of_many_others(
    redis_server: RedisServer, gateway: Gateway
) -> None:
    others = [make_job(max_tokens=ENDLESS) for _ in range(MANY_OUTPUTS)]
    newcomers = [make_job(max_tokens=1) for _ in range(5)]
    async with running_worker(redis_server, STEADY):
        await gateway.begin(*others)
        for job in newcomers:
            await gateway.enqueue(job)
            await gateway.finished(job)
    frames = [[each.handle for each in frame.deltas] for frame in gateway.frames]
    # A frame has more if the one before was still being written.
    assert any([job.handle] in frames for job in newcomers)
    after = next(index for index, each in enumerate(frames) if newcomers[0].handle in each) + 1
    assert max(map(len, frames[after:])) >= MANY_OUTPUTS, "later frames have whole steps again"


async def test_frames_stay_for_a_time_whatever_their_number(
    redis: "Redis", monkeypatch: pytest.MonkeyPatch
) -> None:
    writers = [ReplyWriter(redis, name, 10, lambda *_: None) for name in ("w1", "w2")]
    running = [asyncio.create_task(writer.run()) for writer in writers]

    async def write(frames: int, writer: ReplyWriter = writers[0]) -> int:
        for _ in range(frames):
            writer.outbox("g1").start(JobStarted(1, 1, 3, 0, "class"), is_streamed=True)
            writer.flush()
            await writer.drain(PATIENCE_SECONDS)
        return await redis.xlen(keys.replies("g1"))

    assert await write(150) == 150
    # Another worker writes to the stream for the first time.
    assert await write(2, writers[1]) == 152
    monkeypatch.setattr(replies, "FRAMES_KEPT_MS", 50)
    await asyncio.sleep(0.1)
    # The second frame drops those that were old at the first. Redis drops whole nodes of 100.
    assert await write(2) == 54
    monkeypatch.setattr(replies, "FRAMES_KEPT_MS", 600_000)
    monkeypatch.setattr(replies, "MAX_KEPT_BYTES", 100)
    assert await write(250) < 150
    await end_task(*running)


async def test_same_seed_gives_the_same_text_and_resumes(
    redis_server: RedisServer, gateway: Gateway
) -> None:
    whole = make_job(seed=7, max_tokens=20)
    again = make_job(seed=7, max_tokens=20)
    async with running_worker(redis_server, Script()):
        await gateway.enqueue(whole, again)
        await gateway.finished(whole, again)
        ids = gateway.token_ids(whole)
        rest = make_job(seed=7, max_tokens=12, prompt_token_ids=[*whole.prompt_token_ids, *ids[:8]])
        await gateway.enqueue(rest)
        await gateway.finished(rest)
    assert gateway.token_ids(again) == ids
    assert gateway.token_ids(rest) == ids[8:]


async def test_lease_ends_after_the_last_frame(
    redis: Redis, redis_server: RedisServer, gateway: Gateway
) -> None:
    job = make_job()
    async with running_worker(redis_server, STEADY):
        await gateway.enqueue(job)
        await gateway.finished(job)
        await nothing_leased(gateway)
    assert not await redis.hexists(keys.job(MODEL, job.id), "worker")


async def test_job_cancelled_in_the_queue_never_runs(
    redis_server: RedisServer, gateway: Gateway
) -> None:
    jobs = [make_job(max_tokens=50) for _ in range(3)]
    script = Script(max_sequences=1)
    async with running_worker(redis_server, script, engine_type=Stepwise) as (_, engine, _):
        assert isinstance(engine, Stepwise)
        engine.allow(1)
        await gateway.enqueue(*jobs)
        await gateway.read_until(lambda: bool(gateway.deltas(jobs[0])))
        assert await gateway.queue.cancel(jobs[1].id, jobs[1].tenant)
        engine.allow()
        await gateway.finished(jobs[0], jobs[2])
    assert not gateway.deltas(jobs[1])


@pytest.mark.parametrize("prefill_seconds", [60.0, 0.0], ids=["prefill", "decoding"])
async def test_cancel_frees_the_engine_at_once(
    redis_server: RedisServer, gateway: Gateway, prefill_seconds: float
) -> None:
    job = make_job(max_tokens=ENDLESS, n=4)
    script = Script(step_seconds=0.01, prefill_seconds_per_token=prefill_seconds)
    async with running_worker(redis_server, script) as (_, engine, _):
        await gateway.enqueue(job)
        await until(lambda: running(engine) == 4)
        if not prefill_seconds:
            await gateway.read_until(lambda: bool(gateway.deltas(job)))
        assert await gateway.queue.cancel(job.id, job.tenant)
        await until(lambda: running(engine) == 0)
        await nothing_leased(gateway)
        await gateway.read()
    assert not gateway.ended_handles(), "it did not end by itself"


async def test_cancel_of_a_job_whose_claim_is_in_progress(
    redis_server: RedisServer, gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, claimed, may_continue = make_job(max_tokens=ENDLESS), asyncio.Event(), asyncio.Event()

    async def is_alive(_gateways: link_module.GatewayWatch, _gateway: str) -> bool:
        claimed.set()
        await may_continue.wait()
        return True

    monkeypatch.setattr(link_module.GatewayWatch, "is_alive", is_alive)
    # No lease is extended before the end of the test.
    async with running_worker(redis_server, STEADY, lease_ms=600_000) as (_, engine, _):
        await gateway.enqueue(job)
        await claimed.wait()
        assert await gateway.queue.cancel(job.id, job.tenant)
        control = keys.control(MODEL, WORKER)
        async with asyncio.timeout(PATIENCE_SECONDS):
            while await gateway.redis.exists(control):
                await asyncio.sleep(0.01)
        may_continue.set()
        await nothing_leased(gateway)
        assert running(engine) == 0


@pytest.mark.usefixtures("eager_renewals")
async def test_lost_lease_stops_the_job(
    redis: Redis, redis_server: RedisServer, gateway: Gateway
) -> None:
    job = make_job(max_tokens=ENDLESS)
    async with running_worker(redis_server, STEADY) as (_, engine, _):
        await gateway.enqueue(job)
        await until(lambda: running(engine) == 1)
        await redis.hset(keys.job(MODEL, job.id), "worker", "another")
        await until(lambda: running(engine) == 0)
        await gateway.read()
    assert not gateway.ended_handles(), "it did not end by itself"
    assert await redis.hget(keys.job(MODEL, job.id), "worker") == b"another"


def test_leases_are_renewed_while_they_hold() -> None:
    assert runner_module._RENEWALS_PER_LEASE == 3


@pytest.mark.usefixtures("eager_renewals")
async def test_leases_are_kept_while_jobs_run(
    redis: Redis, redis_server: RedisServer, gateway: Gateway
) -> None:
    job = make_job(max_tokens=ENDLESS)
    async with running_worker(redis_server, STEADY):
        await gateway.begin(job)
        ends: list[float] = []
        leases: Any
        async with asyncio.timeout(PATIENCE_SECONDS):
            while len(ends) < 3:
                leases = await redis.zrange(LEASES, 0, -1, withscores=True)
                [(job_id, end)] = leases
                assert job_id.decode() == job.id
                if end not in ends:
                    ends.append(end)
                await asyncio.sleep(0.01)
        seconds, _ = await redis.time()
    assert ends == sorted(ends)
    # Each lasts as long as the first one.
    assert ends[-1] > seconds * 1000
    assert ends[-1] - ends[0] < LEASE_MS


@pytest.mark.usefixtures("eager_renewals")
async def test_progress_is_charged_with_each_renewal(
    redis: Redis, redis_server: RedisServer, gateway: Gateway
) -> None:
    job = make_job(max_tokens=ENDLESS)
    async with running_worker(redis_server, STEADY) as (_, engine, _):
        await gateway.enqueue(job)
        charged = 0
        async with asyncio.timeout(PATIENCE_SECONDS):
            while charged < 10:
                await asyncio.sleep(0.01)
                charged = int(await redis.hget(keys.job(MODEL, job.id), "charged") or 0)
        (sequence,) = engine._running.values()
        assert charged <= sequence.generated


async def test_waiting_jobs_are_claimed_as_room_appears(
    redis_server: RedisServer, gateway: Gateway
) -> None:
    jobs = [make_job(max_tokens=10) for _ in range(12)]
    script = Script(step_seconds=0.005, max_sequences=4)
    async with running_worker(redis_server, script, engine_type=Stepwise) as (_, engine, _):
        assert isinstance(engine, Stepwise)
        await gateway.enqueue(*jobs)
        await until(lambda: running(engine) == 4)
        engine.allow()
        await gateway.finished(*jobs)
    assert engine.most == 4


async def test_claims_are_bounded_by_the_kv_cache(
    redis_server: RedisServer, gateway: Gateway
) -> None:
    jobs = [make_job(max_tokens=50, prompt_token_ids=[300] * 50) for _ in range(6)]
    script = Script(step_seconds=0.005, kv_cache_tokens=250)
    async with running_worker(redis_server, script, engine_type=Stepwise) as (_, engine, _):
        assert isinstance(engine, Stepwise)
        await gateway.enqueue(*jobs)
        await until(lambda: running(engine) == 2)
        engine.allow()
        await gateway.finished(*jobs)
    assert engine.most == 2


async def test_job_larger_than_the_cache_runs_alone(
    redis_server: RedisServer, gateway: Gateway
) -> None:
    job = make_job(max_tokens=10, prompt_token_ids=[300] * 500)
    async with running_worker(redis_server, Script(kv_cache_tokens=100)):
        await gateway.enqueue(job)
        await gateway.finished(job)
    assert isinstance(gateway.end(job), JobFinished)


async def test_idle_worker_does_not_poll(
    redis: Redis, redis_server: RedisServer, gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert doorbells.WAIT_SECONDS == runner_module._CONTROL_TIMEOUT_SECONDS == 3
    monkeypatch.setattr(doorbells, "WAIT_SECONDS", 2 * PATIENCE_SECONDS)
    monkeypatch.setattr(runner_module, "_CONTROL_TIMEOUT_SECONDS", 2 * PATIENCE_SECONDS)
    async with running_worker(redis_server, STEADY):
        await waiting_for_rings(redis, 3)
        await held_digests(redis, 1)
        before = (await redis.info("stats"))["total_commands_processed"]
        await asyncio.sleep(0.5)
        after = (await redis.info("stats"))["total_commands_processed"]
    assert after - before == 1, "more than the test's own command"


async def test_deadline_before_the_claim_fails_the_job(
    redis_server: RedisServer, gateway: Gateway
) -> None:
    job = make_job(deadline_ms=clock.now_ms() - 1)
    async with running_worker(redis_server, STEADY):
        await gateway.enqueue(job)
        await gateway.finished(job)
        await nothing_leased(gateway)
    end = gateway.end(job)
    assert isinstance(end, JobFailed)
    assert end.code is FailureCode.DEADLINE_EXCEEDED
    assert not gateway.deltas(job)


async def test_deadline_aborts_a_running_job(
    redis_server: RedisServer, gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job(max_tokens=ENDLESS)
    async with running_worker(redis_server, STEADY) as (_, engine, _):
        await gateway.begin(job)
        monkeypatch.setattr(clock, "now_ms", lambda: job.deadline_ms)
        await gateway.finished(job)
        await until(lambda: running(engine) == 0)
    end = gateway.end(job)
    assert isinstance(end, JobFailed)
    assert end.code is FailureCode.DEADLINE_EXCEEDED
    assert gateway.deltas(job)


async def test_job_of_a_dead_gateway_is_dropped(
    redis: Redis, redis_server: RedisServer, gateway: Gateway
) -> None:
    job, dead = make_job(), make_job(gateway="dead")
    await gateway.enqueue(dead, job)
    async with running_worker(redis_server, STEADY):
        await gateway.finished(job)
        await nothing_leased(gateway)
    assert not await redis.exists(keys.replies("dead"))
    assert not await redis.hexists(keys.job(MODEL, dead.id), "worker")


async def test_job_of_a_gateway_that_is_missing_for_a_moment_runs(
    redis: Redis, redis_server: RedisServer, gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = make_job(), make_job()
    async with running_worker(redis_server, STEADY) as (runner, _, _):
        await gateway.enqueue(first)
        await gateway.finished(first)
        monkeypatch.setattr(gateway, "live", partial(redis.delete, keys.gateway_alive("g1")))
        await gateway.live()
        await until(lambda: "g1" in runner.link.gateways.missing_for(0.0))
        await gateway.enqueue(second)
        await gateway.finished(second)


async def test_running_job_of_a_dead_gateway_is_aborted(
    redis: Redis,
    redis_server: RedisServer,
    gateway: Gateway,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("worker.execution.runner.GRACE_SECONDS", 0.5)
    assert link_module.GRACE_SECONDS == 5.0
    job = make_job(max_tokens=ENDLESS)
    async with running_worker(redis_server, STEADY) as (_, engine, _):
        await gateway.enqueue(job)
        await until(lambda: running(engine) == 1)
        await redis.delete(keys.gateway_alive("g1"))
        await until(lambda: running(engine) == 0)
        await nothing_leased(gateway)


async def test_background_job_of_a_dead_gateway_is_handed_back(
    redis: Redis, redis_server: RedisServer, gateway: Gateway
) -> None:
    job = make_job(gateway="dead", is_background=True)
    other = make_job()
    await gateway.enqueue(job, other)
    async with running_worker(redis_server, STEADY):
        await gateway.finished(other)
        await handed_back(gateway, job)
    assert await redis.hget(keys.job(MODEL, job.id), "worker") == WORKER.encode(), "no receipt"


async def test_running_background_job_of_a_dead_gateway_is_reported_and_handed_back(
    redis: Redis,
    redis_server: RedisServer,
    gateway: Gateway,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("worker.execution.runner.GRACE_SECONDS", 0.5)
    job = make_job(max_tokens=ENDLESS, is_background=True, stream=False)
    async with running_worker(redis_server, STEADY) as (_, engine, _):
        await gateway.enqueue(job)
        await until(lambda: any(each.generated for each in engine._running.values()))
        await redis.delete(keys.gateway_alive("g1"))
        await until(lambda: running(engine) == 0)
        await handed_back(gateway, job)
        await gateway.read()
        assert not gateway.ended_handles()
        again = resumed(gateway, job)
        tokens = len(gateway.token_ids(job))
        assert tokens > 0
        assert int(await redis.hget(keys.job(MODEL, job.id), "completion") or 0) == tokens
        await gateway.live()
        await gateway.queue.revive(again, weight=1.0, attempt=1)
        await gateway.read_until(lambda: len(gateway.token_ids(job)) > tokens)
        assert gateway.deltas(job)[-1].attempt == 2
    assert 0 < await redis.ttl(keys.replies("g1")) <= link_module.GONE_SECONDS


async def test_refused_job_fails_alone(redis_server: RedisServer, gateway: Gateway) -> None:
    good = make_job()
    bad = [
        make_job(prompt_token_ids=[10**6]),
        make_job(prompt_token_ids=[2**32 - 1]),
        make_job(stop=[""]),
        make_job(sampling=SamplingSpec(seed=1, top_p=float("nan"))),
    ]
    async with running_worker(redis_server, STEADY):
        await gateway.enqueue(*bad, good)
        await gateway.finished(*bad, good)
    assert isinstance(gateway.end(good), JobFinished)
    for job in bad:
        end = gateway.end(job)
        assert isinstance(end, JobFailed)
        assert end.code is FailureCode.INVALID_REQUEST


async def test_unreadable_job_does_not_stop_the_jobs_of_its_claim(
    redis: Redis, redis_server: RedisServer, gateway: Gateway
) -> None:
    jobs = [make_job() for _ in range(3)]
    first, broken, last = jobs
    await gateway.enqueue(*jobs)
    await redis.hset(keys.job(MODEL, broken.id), "payload", b"\xc1")
    async with running_worker(redis_server, STEADY):
        await gateway.finished(first, last)


@pytest.mark.parametrize("n", [1, 9], ids=["one", "more-than-fit"])
async def test_drain_finishes_running_jobs_and_claims_nothing(
    redis_server: RedisServer, gateway: Gateway, n: int
) -> None:
    job, late = make_job(max_tokens=50, n=n), make_job()
    script = replace(STEADY, max_sequences=4)
    async with running_worker(redis_server, script) as (runner, _, task):
        await gateway.begin(job)
        draining = asyncio.create_task(runner.drain(PATIENCE_SECONDS))
        await until(lambda: runner._claimer.is_stopping)
        await gateway.enqueue(late)
        await gateway.finished(job)
        await draining
        await asyncio.wait_for(task, PATIENCE_SECONDS)
    assert isinstance(gateway.end(job), JobFinished)
    status = await gateway.queue.status()
    assert (status.waiting_jobs, status.leased_jobs) == (1, 0)


async def test_drain_hands_back_jobs_that_take_too_long(
    redis_server: RedisServer, gateway: Gateway
) -> None:
    job = make_job(max_tokens=ENDLESS)
    async with running_worker(redis_server, STEADY) as (runner, engine, task):
        await gateway.begin(job)
        await runner.drain(0.1)
        await asyncio.wait_for(task, PATIENCE_SECONDS)
        assert running(engine) == 0
    await gateway.read()
    assert not gateway.ended_handles()
    assert await lost_jobs(gateway) == {(job.id, 1)}
    (returned,) = gateway.returned(job)
    assert returned == JobReturned(job.handle, 1, ReturnReason.DRAINING, True)
    assert await gateway.queue.requeue(resumed(gateway, job), 1) is RequeueResult.REQUEUED


async def test_dead_engine_hands_everything_back(
    redis_server: RedisServer, gateway: Gateway
) -> None:
    jobs = [make_job(max_tokens=ENDLESS) for _ in range(3)]
    async with running_worker(redis_server, STEADY) as (_, engine, task):
        await gateway.enqueue(*jobs)
        await gateway.read_until(lambda: all(gateway.deltas(job) for job in jobs))
        engine.die()
        with pytest.raises(EngineDeadError):
            await asyncio.wait_for(task, PATIENCE_SECONDS)
    assert await lost_jobs(gateway) == {(job.id, 1) for job in jobs}
    await gateway.read()
    for job in jobs:
        (returned,) = gateway.returned(job)
        assert (returned.reason, returned.has_progressed) == (ReturnReason.ENGINE_DIED, True)


async def test_requeued_job_runs_as_the_next_attempt(
    redis_server: RedisServer, gateway: Gateway
) -> None:
    job = make_job(max_tokens=40)
    first_worker = running_worker(redis_server, STEADY, worker="first", engine_type=Stepwise)
    async with first_worker as (runner, engine, task):
        assert isinstance(engine, Stepwise)
        engine.allow(5)
        await gateway.begin(job)
        runner.stop()
        await task
    (lost,) = await gateway.queue.reclaim()
    await gateway.read()
    first = len(gateway.token_ids(job))
    await gateway.queue.requeue(resumed(gateway, job), lost.attempt)
    async with running_worker(redis_server, STEADY, worker="second"):
        await gateway.finished(job)
    second = [d for d in gateway.deltas(job) if d.attempt == 2]
    assert 0 < first < 40
    assert len([each for delta in second for each in delta.token_ids]) == 40 - first
    assert gateway.end(job).attempt == 2


async def test_two_workers_share_the_queue(redis_server: RedisServer, gateway: Gateway) -> None:
    jobs: list[GenerationJob] = [make_job(max_tokens=20) for _ in range(40)]
    script = Script(step_seconds=0.005, max_sequences=4)
    async with (
        running_worker(redis_server, script, worker="a", engine_type=Stepwise) as (_, one, _),
        running_worker(redis_server, script, worker="b", engine_type=Stepwise) as (_, two, _),
    ):
        await gateway.enqueue(*jobs)
        await until(lambda: running(one) == running(two) == 4)
        for engine in (one, two):
            assert isinstance(engine, Stepwise)
            engine.allow()
        await gateway.finished(*jobs)
    assert {frame.worker for frame in gateway.frames} == {"a", "b"}
    for job in jobs:
        assert len(gateway.token_ids(job)) == 20


async def test_wake_up_is_immediate(
    redis: Redis, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = Gateway(redis)
    monkeypatch.setattr(doorbells, "WAIT_SECONDS", 2 * PATIENCE_SECONDS)
    monkeypatch.setattr(runner_module, "_CONTROL_TIMEOUT_SECONDS", 2 * PATIENCE_SECONDS)
    async with running_worker(redis_server, Script()):
        # Each time the worker waits for its doorbell and for cancelled jobs.
        for _ in range(3):
            await waiting_for_rings(redis, 3)
            job = make_job(max_tokens=1)
            await gateway.enqueue(job)
            await gateway.finished(job)


async def test_job_claimed_by_hand_is_left_alone(
    redis_server: RedisServer, gateway: Gateway
) -> None:
    job = make_job()
    await gateway.enqueue(job)
    await gateway.queue.claim("another", ROOM, most_jobs=1, lease_ms=60_000)
    later = make_job()
    async with running_worker(redis_server, STEADY):
        await gateway.enqueue(later)
        await gateway.finished(later)
    assert not gateway.deltas(job)
    assert gateway.ended_handles() == {later.handle}


class SlowToRead(ScriptedEngine):
    """Is slow to submit jobs with a grammar, as vLLM is."""

    def __init__(self, folder: Path, script: Script) -> None:
        super().__init__(folder, script)
        self.may_go_on = asyncio.Event()
        self.error: Exception | None = None

    @override
    async def submit(self, requests: Sequence[EngineRequest]) -> None:
        if requests[0].grammar:
            await self.may_go_on.wait()
            if self.error is not None:
                raise self.error
        await super().submit(requests)


STRUCTURED = Script(step_seconds=0.002, claimed_features=[Feature.STRUCTURE])


async def test_slow_submission_does_not_delay_other_jobs(
    redis_server: RedisServer, gateway: Gateway
) -> None:
    async with running_worker(redis_server, STRUCTURED, engine_type=SlowToRead) as (_, engine, _):
        assert isinstance(engine, SlowToRead)
        slow, quick = make_job(grammar="start: /a/", n=3), make_job()
        await gateway.enqueue(slow, quick)
        await gateway.finished(quick)
        assert slow.handle not in gateway.ended_handles()
        engine.may_go_on.set()
        await gateway.finished(slow)
        assert isinstance(gateway.end(slow), JobFinished)
        assert len(gateway.token_ids(slow, 2)) == 8


async def test_job_cancelled_during_submission_leaves_no_keys(
    redis_server: RedisServer, gateway: Gateway
) -> None:
    async with running_worker(redis_server, STRUCTURED, engine_type=SlowToRead) as started:
        runner, engine, _ = started
        assert isinstance(engine, SlowToRead)
        slow = make_job(grammar="start: /a/", n=3, max_tokens=ENDLESS)
        await gateway.enqueue(slow)
        async with asyncio.timeout(PATIENCE_SECONDS):
            while slow.id not in runner._jobs.by_id:
                await asyncio.sleep(0.01)
            assert await gateway.queue.cancel(slow.id, slow.tenant)
            while slow.id in runner._jobs.by_id:
                await asyncio.sleep(0.01)
        engine.may_go_on.set()
        after = make_job()
        await gateway.enqueue(after)
        await gateway.finished(after)
        assert running(engine) == 0


EXCESS = ContextExcess(prompt_tokens=70, max_tokens=5, window=64)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InvalidRequestError("no"), FailureCode.INVALID_REQUEST),
        (InvalidRequestError("no", excess=EXCESS), FailureCode.INVALID_REQUEST),
        (RuntimeError("a bug"), FailureCode.ENGINE_ERROR),
    ],
    ids=["refused", "too long", "bug"],
)
async def test_job_that_cannot_be_submitted_fails_alone(
    redis_server: RedisServer, gateway: Gateway, error: Exception, code: FailureCode
) -> None:
    async with running_worker(redis_server, STRUCTURED, engine_type=SlowToRead) as (_, engine, _):
        assert isinstance(engine, SlowToRead)
        engine.error = error
        engine.may_go_on.set()
        bad, good = make_job(grammar="start: /a/"), make_job()
        await gateway.enqueue(bad, good)
        await gateway.finished(bad, good)
        end = gateway.end(bad)
        assert isinstance(end, JobFailed)
        assert end.code is code
        assert end.excess == getattr(error, "excess", None)
        assert end.param == ("prompt" if end.excess else None)
        assert isinstance(gateway.end(good), JobFinished)


class GivesUp(ScriptedEngine):
    """Aborts sequences where they should end for their length."""

    end = SequenceEnd.ERROR

    @override
    async def step(self) -> EngineStep:
        step = await super().step()
        outputs = [
            msgspec.structs.replace(each, end=self.end) if each.end is SequenceEnd.LENGTH else each
            for each in step.outputs
        ]
        return step._replace(outputs=outputs)


async def test_job_that_the_engine_aborts_fails_alone(
    redis_server: RedisServer, gateway: Gateway
) -> None:
    async with running_worker(redis_server, STRUCTURED, engine_type=GivesUp) as (_, engine, _):
        structured = make_job(grammar="start: /a/", max_tokens=3, n=2)
        plain, other = make_job(max_tokens=3), make_job(max_tokens=ENDLESS)
        await gateway.enqueue(other, structured, plain)
        await gateway.finished(structured, plain)
        await gateway.read_until(lambda: len(gateway.token_ids(other)) > 20)
        ends = [gateway.end(structured), gateway.end(plain)]
        assert running(engine) == 1
    assert [(type(end), getattr(end, "code", None)) for end in ends] == [
        (JobFailed, FailureCode.INVALID_REQUEST),
        (JobFailed, FailureCode.ENGINE_ERROR),
    ]
    assert "The grammar became too complex, or it and" in getattr(ends[0], "message", "")


async def test_job_that_forbids_every_next_token_fails_with_its_parameters(
    redis_server: RedisServer, gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GivesUp, "end", SequenceEnd.STUCK)
    sampling = SamplingSpec(seed=1, bad_words=["word"], logit_bias={5: -math.inf, 6: 1.0})
    job = make_job(grammar="start: /a/", sampling=sampling, max_tokens=3, n=2)
    async with running_worker(redis_server, STRUCTURED, engine_type=GivesUp) as (_, engine, _):
        await gateway.enqueue(job)
        await gateway.finished(job)
        assert running(engine) == 0
    end = gateway.end(job)
    assert isinstance(end, JobFailed)
    assert end.code is FailureCode.INVALID_REQUEST
    assert end.message == "No next token was left by the grammar and bad_words and logit_bias."
    assert gateway.token_ids(job), "what was sampled before is sent"


async def test_stop_tokens_and_min_tokens(redis_server: RedisServer, gateway: Gateway) -> None:
    async with running_worker(redis_server, Script(completion_tokens=2)) as (_, engine, _):
        allowed = [500, 501, 502]
        spec = SamplingSpec(seed=1, allowed_token_ids=allowed, stop_token_ids=allowed)
        stopped = make_job(sampling=spec)
        late = make_job(sampling=SamplingSpec(seed=1, min_tokens=5))
        await gateway.enqueue(stopped, late)
        await gateway.finished(stopped, late)
        (delta,) = gateway.deltas(stopped)
        assert delta.stop_reason in allowed
        assert delta.text == ""
        assert len(gateway.token_ids(late)) == 6
        assert gateway.token_ids(late)[-1] in engine.info.eos_token_ids


async def test_patience_is_a_second_and_jobs_are_kept_for_the_setting(
    redis_server: RedisServer, gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim, asked = JobQueue.claim, list[Affinity]()

    async def note(queue: JobQueue, worker: str, room: Room, **more: Any) -> ClaimResult:
        asked.append(more["affinity"])
        return await claim(queue, worker, room, **more)

    monkeypatch.setattr(JobQueue, "claim", note)
    for seconds, milliseconds in ((15.0, (1_000, 15_000)), (0.5, (500, 500)), (0.0, (0, 0))):
        asked.clear()
        async with running_worker(redis_server, STEADY, affinity_seconds=seconds):
            await until(lambda: bool(asked))
        assert (asked[0].patience_ms, asked[0].longest_keep_ms) == milliseconds
