"""Redis restarts, with or without its data, and gateways and workers keep their jobs."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import ConstantBackoff

from contract import keys, messages
from contract.messages import Delta, Frame, JobFinished
from contract.queue import JobClaim, LeaseReport
from gateway.completions.queue import dispatcher as dispatching
from tests.gateway.completions.queue.test_resumption import received
from tests.gateway.conftest import eventually, nothing_left
from tests.gateway.desk import (
    GATEWAY,
    MODEL,
    Desk,
    begun,
    cancel_unreachable,
    hurry,
    take,
    texts,
    ticket_of,
)
from tests.support.fake_worker import FakeWorker
from tests.support.redis_server import BUNDLED, RedisServer

RESUME_AFTER_SECONDS = 3600.0
"""Ends when a test ends it."""


@pytest.fixture(params=[None, "always"], ids=["without a file", "with a file"])
def server(request: pytest.FixtureRequest) -> Iterator[RedisServer]:
    """A server that may be restarted."""
    server = RedisServer(BUNDLED, append=request.param)
    server.start()
    yield server
    server.close()


@pytest.fixture
async def client(server: RedisServer) -> AsyncIterator["Redis"]:
    """A client that waits for a server that is being started."""
    client = Redis.from_url(server.url, retry=Retry(ConstantBackoff(0.05), 100))
    yield client
    await client.aclose()


@pytest.fixture
async def worker(client: "Redis") -> FakeWorker:
    """A worker."""
    worker = FakeWorker(client, MODEL)
    await worker.announce()
    return worker


@pytest.fixture
async def desk(
    server: RedisServer, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Desk]:
    """A dispatcher that gives workers time after an outage; its own client does not wait."""
    hurry(monkeypatch)
    monkeypatch.setattr(dispatching, "HEARTBEAT_SECONDS", 0.2)
    client = Redis.from_url(server.url, retry=Retry(ConstantBackoff(0), 1))
    desk = Desk(client, GATEWAY, resume_after_seconds=RESUME_AFTER_SECONDS)
    await desk.open()
    yield desk
    await desk.close()
    await client.aclose()


def only(**kind: str | None) -> pytest.MarkDecorator:
    """Run a test on one kind of server: the persistence of Redis does not matter."""
    return pytest.mark.parametrize("server", kind.values(), indirect=True, ids=kind)


def is_kept(server: RedisServer) -> bool:
    """Whether the server keeps its data over a restart."""
    return server._append is not None


async def restart(server: RedisServer, client: "Redis") -> None:
    """Kill the server, and start it again when all leases have run out."""
    await asyncio.to_thread(server.kill)
    await asyncio.to_thread(server.start)
    leases: Any = await client.zrange(keys.leases(MODEL), 0, -1)
    if leases:
        await client.zadd(keys.leases(MODEL), dict.fromkeys(leases, 1))


def end_the_time_of_workers(desk: Desk) -> None:
    """End the time in which workers report their jobs."""
    desk.dispatcher.presence._resume_after_seconds = 0.0


async def test_living_worker_keeps_its_job_if_redis_keeps_it(
    server: RedisServer, desk: Desk, worker: FakeWorker
) -> None:
    generation, claim = await begun(desk, worker)
    assert texts(await take(generation, 1)) == ["a"]
    await restart(server, worker._redis)
    report = LeaseReport(claim.job.id, claim.attempt, 1)
    lost = await worker.queue.extend(worker.name, [report], lease_ms=60_000)
    if is_kept(server):
        assert lost == []
        end_the_time_of_workers(desk)
        await desk.dispatcher._lost_jobs.reclaim()
        await desk.look_after_jobs()
        await worker.say(claim, "b")
        await worker.finish(claim)
    else:
        assert lost == [claim.job.id]
        end_the_time_of_workers(desk)
        await worker.announce()
        again = await worker.claim_one()
        assert (again.attempt, again.job.resumption) == (2, received(1))
        assert await worker._redis.exists(keys.gateway_alive(GATEWAY))
        await worker.say(again, "b")
        await worker.finish(again)
    assert texts(await take(generation, 2)) == ["b"]
    assert desk.dispatcher.jobs_in_flight == 0


async def test_job_of_a_lost_worker_continues_after_a_redis_restart(
    server: RedisServer, desk: Desk, worker: FakeWorker
) -> None:
    generation, _ = await begun(desk, worker)
    assert texts(await take(generation, 1)) == ["a"]
    await restart(server, worker._redis)
    end_the_time_of_workers(desk)
    other = FakeWorker(worker._redis, MODEL, name="fake-2")
    await other.announce()
    again = await other.claim_one()
    assert (again.attempt, again.job.resumption) == (2, received(1))
    await other.finish(again)
    assert isinstance((await take(generation, 1))[0], JobFinished)


async def test_waiting_job_waits_again_after_a_restart(
    server: RedisServer, desk: Desk, worker: FakeWorker
) -> None:
    generation = await desk.request()
    await restart(server, worker._redis)
    end_the_time_of_workers(desk)
    await worker.announce()
    claim = await worker.claim_one()
    await worker.say(claim, "a")
    await worker.finish(claim)
    assert texts(await take(generation, 2)) == ["a"]


@only(without_a_file=None)
async def test_gateway_sends_its_heartbeat_before_its_jobs_run_again(
    server: RedisServer, desk: Desk, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    await desk.close()
    monkeypatch.setattr(dispatching, "HEARTBEAT_SECONDS", 600)
    await desk.open()
    await desk.request()
    await restart(server, worker._redis)
    await worker._redis.delete(keys.gateway_alive(GATEWAY), keys.job(MODEL, "gw-1-1"))
    end_the_time_of_workers(desk)
    await worker.announce()
    await worker.claim_one()
    assert await worker._redis.exists(keys.gateway_alive(GATEWAY))


async def write(client: "Redis", claim: JobClaim, number: int, entry: str) -> None:
    """Write a worker's frame, whose number its token has as well, under a certain id."""
    text = "abc"[number - 1]
    delta = Delta(claim.job.handle, 1, 0, number - 1, text, [number])
    frame = messages.encode(Frame("fake-1", number, deltas=[delta]))
    await client.xadd(keys.replies(GATEWAY), {"f": frame}, id=entry)


@only(without_a_file=None)
async def test_reply_stream_with_lower_ids_is_read(
    server: RedisServer, desk: Desk, worker: FakeWorker, client: "Redis"
) -> None:
    generation = await desk.request()
    claim = await worker.claim_one()
    await write(client, claim, 1, "*")
    assert texts(await take(generation, 1)) == ["a"]
    await desk.close()
    await restart(server, client)
    await client.delete(keys.replies(GATEWAY))
    await desk.open()
    # The new server's clock is earlier than the former one's.
    await write(client, claim, 2, "5-1")
    assert texts(await take(generation, 1)) == ["b"]
    await write(client, claim, 3, "5-2")
    assert texts(await take(generation, 1)) == ["c"]


@only(with_a_file="always")
async def test_frames_on_a_replica_are_not_applied_twice(
    server: RedisServer, desk: Desk, worker: FakeWorker, client: "Redis"
) -> None:
    generation = await desk.request()
    claim = await worker.claim_one()
    await write(client, claim, 1, "*")
    await write(client, claim, 2, "*")
    assert texts(await take(generation, 2)) == ["a", "b"]
    await desk.close()
    await restart(server, client)
    await client.delete(keys.replies(GATEWAY))
    await write(client, claim, 1, "5-1")
    await write(client, claim, 2, "5-2")
    await write(client, claim, 3, "5-3")
    await desk.open()
    assert texts(await take(generation, 1)) == ["c"]
    assert ticket_of(desk, generation).attempt == 1


@only(without_a_file=None)
async def test_job_that_could_not_be_cancelled_is_cancelled_later(
    desk: Desk, client: "Redis", monkeypatch: pytest.MonkeyPatch
) -> None:
    generation = await desk.request()
    await cancel_unreachable(desk, generation, monkeypatch)
    await eventually(lambda: nothing_left(client, MODEL), what="the job being dropped")
