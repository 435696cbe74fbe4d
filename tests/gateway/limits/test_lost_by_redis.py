"""Redis loses all data, or confirmed writes, while requests run."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from redis.asyncio import Redis

from common.tasks import end_task
from contract import keys
from gateway.limits import reservations as module
from gateway.limits.replies import ReservationRequest, ReserveReply
from gateway.limits.store import QuotaStore
from gateway.platform.redis_client import connect
from gateway.records.errors import RateLimitError
from tests.gateway.limits.building import (
    BUCKET,
    TENANT,
    key_of,
    open_ids,
    record,
    release_of,
    settlement,
    usage,
)
from tests.gateway.limits.fake_ledger import FakeLedger
from tests.gateway.limits.test_reservations import GatewayDesk, Line, until
from tests.support.patience import PATIENCE_SECONDS
from tests.support.redis_server import BUNDLED, RedisServer

KEY = key_of(concurrent_requests=2, budget_micros=1_000, tokens_per_minute=10_000)
AMOUNTS: dict[str, Any] = {"prompt": 10, "completion": 20, "cost": 300}


@pytest.fixture
def server() -> Iterator[RedisServer]:
    """A server without persistence."""
    server = RedisServer(BUNDLED)
    server.start()
    yield server
    server.close()


@pytest.fixture
async def client(server: RedisServer) -> AsyncIterator["Redis"]:
    """A gateway's client of the server."""
    client = connect(server.url, max_connections=16)
    yield client
    await client.aclose()


@pytest.fixture
async def desk(client: "Redis", monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[GatewayDesk]:
    """A gateway that checks Redis often."""
    monkeypatch.setattr(module, "WATCH_SECONDS", 0.05)
    desk = GatewayDesk(Line(client), FakeLedger(), KEY)
    task = asyncio.create_task(desk.reservations.run())
    yield desk
    await end_task(task)
    await desk.reservations.aclose(seconds=0.2)


async def emptied(server: RedisServer) -> None:
    """Restart the server without data."""
    await asyncio.to_thread(server.kill)
    await asyncio.to_thread(server.start)


async def until_it_knows_the_server(desk: GatewayDesk) -> None:
    """Wait until a gateway would notice that another server has replaced this one."""

    async def knows() -> bool:
        # It sends the next command only after a reply.
        return [args[0] for args in desk.line.sent].count("INFO") > 1

    await until(knows)


async def recorded(client: "Redis") -> list[str]:
    """Return the ids of the requests that have usage records."""
    return [one.request_id for one in await usage(client)]


async def until_all_have_ended(client: "Redis") -> None:
    """Wait until no request is open."""

    async def have_ended() -> bool:
        return await open_ids(client) == set()

    await until(have_ended)


async def concurrent(desk: GatewayDesk) -> int:
    """Return the number of running requests of the key in Redis."""
    (status,) = await desk.store.status(TENANT, [KEY])
    return status.concurrent_requests


async def test_running_requests_keep_places_and_money_when_redis_is_emptied(
    desk: GatewayDesk, server: RedisServer, client: "Redis"
) -> None:
    await until_it_knows_the_server(desk)
    for request_id in ("r1", "r2"):
        await desk.reserve(request_id, **AMOUNTS)
    await emptied(server)

    async def are_restored() -> bool:
        return await open_ids(client) == {"r1", "r2"}

    await until(are_restored)
    assert await concurrent(desk) == 2
    (status,) = await desk.store.status(TENANT, [KEY])
    assert status.cost_this_month == 600
    with pytest.raises(RateLimitError):
        await desk.reserve("r3", **AMOUNTS)
    for request_id in ("r1", "r2"):
        ended = record(request_id, prompt_tokens=10, completion_tokens=5, cost_micros=100)
        assert await desk.reservations.end(settlement(ended))
    assert await open_ids(client) == set()
    assert await concurrent(desk) == 0
    (status,) = await desk.store.status(TENANT, [KEY])
    assert status.cost_this_month == 200
    assert sorted(await recorded(client)) == ["r1", "r2"]


async def test_confirmed_records_that_redis_lost_are_sent_again(
    desk: GatewayDesk, server: RedisServer, client: "Redis"
) -> None:
    await until_it_knows_the_server(desk)
    await desk.reserve("r1", **AMOUNTS)
    assert await desk.reservations.end(settlement(record("r1", completion_tokens=5)))
    assert len(await usage(client)) == 1
    await emptied(server)

    async def is_back() -> bool:
        return await recorded(client) == ["r1"]

    await until(is_back)


async def test_endings_lost_in_a_failover_are_repeated(desk: GatewayDesk, client: "Redis") -> None:
    await until_it_knows_the_server(desk)
    for request_id in ("r1", "r2"):
        await desk.reserve(request_id, **AMOUNTS)
    assert await desk.reservations.end(
        settlement(record("r1", completion_tokens=5, cost_micros=100))
    )
    assert await desk.reservations.end(release_of("r2"))
    # The new master lacks these endings.
    await client.delete(keys.usage(BUCKET))
    for request_id in ("r1", "r2"):
        await desk.store.reserve(desk.request(request_id, **AMOUNTS), lease_ms=module.LEASE_MS)
    assert await concurrent(desk) == 2

    desk.store._processes._known = {"another"}

    await until_all_have_ended(client)
    assert await concurrent(desk) == 0
    assert await recorded(client) == ["r1"]


async def test_request_that_ends_while_its_reservation_is_restored_leaves_nothing(
    desk: GatewayDesk, client: "Redis", monkeypatch: pytest.MonkeyPatch
) -> None:
    await desk.reserve("r1", **AMOUNTS)
    await client.flushall()
    asked, may_go_on = asyncio.Event(), asyncio.Event()
    reserve = QuotaStore.reserve

    async def slow(store: QuotaStore, request: ReservationRequest, **how: Any) -> ReserveReply:
        asked.set()
        await may_go_on.wait()
        return await reserve(store, request, **how)

    monkeypatch.setattr(QuotaStore, "reserve", slow)
    renewing = asyncio.create_task(desk.reservations.renew())
    await asyncio.wait_for(asked.wait(), PATIENCE_SECONDS)
    assert await desk.reservations.end(settlement(record("r1", completion_tokens=5)))
    may_go_on.set()
    await renewing

    await until_all_have_ended(client)
    assert await concurrent(desk) == 0
    assert await recorded(client) == ["r1"]


async def test_request_whose_limit_was_used_up_meanwhile_ends_normally(
    desk: GatewayDesk, client: "Redis"
) -> None:
    await desk.reserve("r1", **AMOUNTS)
    await client.flushall()
    other = GatewayDesk(Line(client), FakeLedger(), KEY)
    for request_id in ("o1", "o2"):
        await other.reserve(request_id, **AMOUNTS)
    await desk.reservations.renew()
    assert await open_ids(client) == {"o1", "o2"}
    assert await desk.reservations.end(settlement(record("r1", completion_tokens=5)))
    assert await recorded(client) == ["r1"]
