"""Redis outages while jobs run."""

import asyncio
from collections.abc import Iterator

import pytest

from contract import keys
from tests.support.patience import PATIENCE_SECONDS
from tests.support.redis_server import RedisServer, running_redis
from tests.worker.conftest import (
    ENDLESS,
    MODEL,
    Gateway,
    Stepwise,
    connect,
    make_job,
    running_worker,
)
from worker.engine.scripted import Script

STEADY = Script(step_seconds=0.01)


@pytest.fixture
def own_redis() -> Iterator[RedisServer]:
    """A separate server, which the test stops."""
    with running_redis() as server:
        yield server


async def test_frames_wait_for_redis_and_arrive_without_gaps(own_redis: RedisServer) -> None:
    job = make_job(max_tokens=300)
    async with connect(own_redis) as client:
        gateway = Gateway(client)
        async with running_worker(own_redis, STEADY, engine_type=Stepwise) as (_, engine, _):
            assert isinstance(engine, Stepwise)
            # No frame is in flight when Redis stops: unread frames would be lost with it.
            engine.allow(20)
            await gateway.enqueue(job)
            await gateway.read_until(lambda: len(gateway.token_ids(job)) == 20)
            own_redis.stop()
            (sequence,) = engine._running.values()
            engine.allow(20)
            async with asyncio.timeout(PATIENCE_SECONDS):
                while sequence.generated < 40:  # The engine continues.
                    await asyncio.sleep(0.01)
            own_redis.start()
            engine.allow()
            gateway._last = "0"
            await gateway.live()
            await gateway.read_until(lambda: len(gateway.token_ids(job)) > 100)
    numbers = [frame.number for frame in gateway.frames]
    assert numbers == list(range(1, len(numbers) + 1))


async def test_jobs_are_aborted_when_too_much_is_unwritten(own_redis: RedisServer) -> None:
    job = make_job(max_tokens=ENDLESS)
    async with connect(own_redis) as client:
        gateway = Gateway(client)
        script = Script(step_seconds=0.002)
        worker = running_worker(own_redis, script, most_pending_deltas=100, engine_type=Stepwise)
        async with worker as (runner, engine, _):
            assert isinstance(engine, Stepwise)
            engine.allow(1)
            await gateway.begin(job)
            own_redis.stop()
            (sequence,) = engine._running.values()
            engine.allow()
            async with asyncio.timeout(PATIENCE_SECONDS):
                while engine._running:
                    await asyncio.sleep(0.01)
            assert sequence.generated < job.max_tokens, "it did not end by itself"
            assert not runner._jobs.by_id
            assert not runner.link.writer.outbox("g1").deltas, "it leaves nothing in memory"
            own_redis.start()
            again = make_job()
            await gateway.live()
            gateway._last = "0"
            await gateway.enqueue(again)
            await gateway.finished(again)


async def test_only_jobs_of_the_gateway_with_unwritten_frames_are_aborted(
    own_redis: RedisServer,
) -> None:
    job, other = make_job(max_tokens=ENDLESS), make_job(max_tokens=ENDLESS, gateway="g2")
    async with connect(own_redis) as client:
        gateway, second = Gateway(client), Gateway(client, "g2")
        script = Script(step_seconds=0.002)
        async with running_worker(own_redis, script, most_pending_deltas=100) as (runner, _, _):
            await gateway.begin(job)
            await second.begin(other)
            # A key of the wrong type: every XADD fails.
            await client.set(keys.replies("g1"), "in the way")
            async with asyncio.timeout(PATIENCE_SECONDS):
                while job.id in runner._jobs.by_id:
                    await asyncio.sleep(0.01)
            before = len(second.token_ids(other))
            await second.read_until(lambda: len(second.token_ids(other)) > before + 200)
            assert runner._jobs.by_id.keys() == {other.id}
            await client.delete(keys.replies("g1"))


async def test_job_that_ended_during_an_outage_leaves_nothing_in_an_empty_redis(
    own_redis: RedisServer,
) -> None:
    job = make_job(max_tokens=30)
    async with connect(own_redis) as client:
        gateway = Gateway(client)
        async with running_worker(own_redis, STEADY, engine_type=Stepwise) as (runner, engine, _):
            assert isinstance(engine, Stepwise)
            engine.allow(1)
            await gateway.begin(job)
            own_redis.stop()
            engine.allow()
            async with asyncio.timeout(PATIENCE_SECONDS):
                while engine._running:
                    await asyncio.sleep(0.01)
            own_redis.start()
            gateway._last = "0"
            await gateway.live()
            await gateway.finished(job)
            await asyncio.wait_for(runner.link.leases.settled.wait(), PATIENCE_SECONDS)
            assert not await client.exists(keys.job(MODEL, job.id))
            assert not await client.zcard(keys.leases(MODEL))
            again = make_job()
            await gateway.enqueue(again)
            await gateway.finished(again)


async def test_failed_frame_is_sent_again_with_its_number(own_redis: RedisServer) -> None:
    job = make_job(max_tokens=20)
    async with connect(own_redis) as client:
        gateway = Gateway(client)
        await gateway.live()
        # A key of the wrong type: every XADD fails.
        await client.set(keys.replies("g1"), "in the way")
        async with running_worker(own_redis, STEADY):
            await gateway.enqueue(job)
            async with asyncio.timeout(PATIENCE_SECONDS):
                while "errorstat_WRONGTYPE" not in await client.info("errorstats"):
                    await asyncio.sleep(0.01)
            await client.delete(keys.replies("g1"))
            await gateway.finished(job)
    numbers = [frame.number for frame in gateway.frames]
    assert numbers == list(range(1, len(numbers) + 1))
    assert len(gateway.token_ids(job)) == 20
