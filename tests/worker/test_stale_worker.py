"""A worker that was stopped for long drops jobs that others have claimed, and continues."""

import asyncio
import signal
from itertools import pairwise

from redis.asyncio import Redis

from contract import keys
from contract.messages import JobFinished
from contract.queue import RequeueResult
from tests.support.redis_server import RedisServer
from tests.worker.conftest import MODEL, Gateway, make_job, resumed
from tests.worker.test_process import ended, ready, worker_process

LEASE = "--lease-seconds=1"


async def test_stopped_worker_drops_jobs_that_another_one_runs(
    redis: Redis, redis_server: RedisServer, gateway: Gateway
) -> None:
    jobs = [make_job(max_tokens=1000, n=2) for _ in range(3)]
    with worker_process(redis_server, LEASE) as first:
        await ready(gateway)
        await gateway.begin(*jobs)
        first.send_signal(signal.SIGSTOP)
        await gateway.lost(*jobs)
        await gateway.read()
        known = len(gateway.frames)
        for job in jobs:
            result = await gateway.queue.requeue(resumed(gateway, job), 1)
            assert result is RequeueResult.REQUEUED
        faster = ("--worker-id=w2", "--scripted-step-seconds=0.003")
        second_worker = worker_process(redis_server, LEASE, *faster)
        with second_worker as second:
            await gateway.read_until(
                lambda: all(gateway.deltas(job)[-1].attempt == 2 for job in jobs)
            )
            first.send_signal(signal.SIGCONT)
            # Pending frames of the first worker arrive late, then it finds its leases lost.
            await gateway.finished(*jobs)
            late = [frame for frame in gateway.frames[known:] if frame.worker == "w1"]
            assert {delta.attempt for frame in late for delta in frame.deltas} <= {1}
            assert not any(frame.finished or frame.failed or frame.returned for frame in late)
            # As a gateway does, drop replies of fenced attempts.
            for frame in late:
                gateway.frames.remove(frame)
            for job in jobs:
                end = gateway.end(job)
                assert isinstance(end, JobFinished)
                assert (end.attempt, end.completion_tokens) == (2, 2000)
                for choice in range(2):
                    deltas = gateway.deltas(job, choice)
                    for before, after in pairwise(deltas):
                        assert after.start == before.start + len(before.token_ids)
            second.send_signal(signal.SIGTERM)
            assert await ended(second) == 0
        assert first.poll() is None
        again = make_job()
        await gateway.enqueue(again)
        await gateway.finished(again)
        first.send_signal(signal.SIGTERM)
        assert await ended(first) == 0
    assert not await redis.zcard(keys.leases(MODEL))


async def test_worker_stopped_longer_than_the_stall_limit_keeps_its_engine(
    redis_server: RedisServer, gateway: Gateway
) -> None:
    job = make_job(max_tokens=300)
    options = ("--stall-seconds=1", "--lease-seconds=30")
    with worker_process(redis_server, *options) as process:
        await ready(gateway)
        await gateway.begin(job)
        process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(2)
        process.send_signal(signal.SIGCONT)
        await gateway.finished(job)
    assert isinstance(gateway.end(job), JobFinished)
    assert not gateway.returned(job)
