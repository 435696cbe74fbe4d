"""Revocation reaches every gateway by its announcement: their caches hold for an hour."""

import asyncio

import pytest
from redis.asyncio import Redis

from contract.dialect import Dialect
from contract.keys import KEY_EVENTS
from gateway.accounts.keys.service import CreatedKey, KeyService
from gateway.accounts.tenants.service import TenantService
from gateway.platform.changes import ChangeAnnouncer
from gateway.platform.database.engine import Database
from gateway.platform.redis_client import connect
from tests.gateway.auth.gateways import (
    Gateway,
    all_accept,
    have_found_their_place,
    until_refused,
)
from tests.support.patience import PATIENCE_SECONDS
from tests.support.redis_server import BUNDLED, RedisServer


async def test_revoked_key_is_refused_by_every_gateway(
    gateways: list[Gateway], keys: KeyService, key: CreatedKey
) -> None:
    assert await all_accept(gateways, key)
    await keys.revoke("acme", key.record.id)
    await until_refused(gateways, key)


async def test_suspended_tenant_is_refused_by_every_gateway(
    gateways: list[Gateway], tenants: TenantService, key: CreatedKey
) -> None:
    assert await all_accept(gateways, key)
    await tenants.suspend("acme")
    await until_refused(gateways, key)
    await tenants.activate("acme")
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not await all_accept(gateways, key):
            await asyncio.sleep(0.005)


async def test_changed_options_reach_every_gateway(
    gateways: list[Gateway], tenants: TenantService, keys: KeyService, key: CreatedKey
) -> None:
    assert await all_accept(gateways, key)

    async def dialects() -> set[Dialect | None]:
        header = f"Bearer {key.key.reveal()}"
        return {(await each.authenticator.authenticate(header)).dialect for each in gateways}

    assert await dialects() == {None}
    await tenants.update("acme", dialect=Dialect.OMLX)
    async with asyncio.timeout(PATIENCE_SECONDS):
        while await dialects() != {Dialect.OMLX}:
            await asyncio.sleep(0.005)
    await keys.update("acme", key.record.id, dialect=Dialect.VLLM)
    async with asyncio.timeout(PATIENCE_SECONDS):
        while await dialects() != {Dialect.VLLM}:
            await asyncio.sleep(0.005)


async def test_events_of_other_kinds_change_nothing(
    gateways: list[Gateway], redis: Redis, key: CreatedKey
) -> None:
    assert await all_accept(gateways, key)
    await redis.xadd(KEY_EVENTS, {"something": "else"})
    await redis.xadd(KEY_EVENTS, {"key": b"\xff\xfe"})
    last = await redis.xadd(KEY_EVENTS, {"tenant": ""})
    async with asyncio.timeout(PATIENCE_SECONDS):
        while any(gateway.listener._last_id != last for gateway in gateways):
            await asyncio.sleep(0.01)
    for gateway in gateways:
        assert len(gateway.authenticator._keys) == 1


async def _lose_connections(redis: Redis) -> None:
    await redis.client_kill_filter(_type="normal", skipme=True)


async def test_revocation_during_a_short_interruption_is_not_missed(
    gateways: list[Gateway], keys: KeyService, redis: Redis, key: CreatedKey
) -> None:
    assert await all_accept(gateways, key)
    await _lose_connections(redis)
    await keys.revoke("acme", key.record.id)
    await until_refused(gateways, key)


async def test_gap_in_the_stream_empties_every_cache(
    database: Database, redis: Redis, redis_server: RedisServer, keys: KeyService, key: CreatedKey
) -> None:
    gateway = Gateway(database, redis_server.url)
    gateway.listener.start()
    await have_found_their_place([gateway])
    assert await gateway.accepts(key)
    await gateway.listener.stop()
    await keys.revoke("acme", key.record.id)
    for number in range(3):
        await redis.xadd(KEY_EVENTS, {"tenant": f"t{number}"})
    await redis.xtrim(KEY_EVENTS, maxlen=1, approximate=False)
    assert await gateway.accepts(key), "the revocation has not arrived yet"
    gateway.listener.start()
    await until_refused([gateway], key)
    await gateway.aclose()


async def until_it_waits_to_retry(caplog: pytest.LogCaptureFixture) -> None:
    """Wait until the listener has found that Redis is away."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while "cannot read revocations" not in caplog.text:
            await asyncio.sleep(0.005)


async def test_listener_outlives_a_restart_of_redis(
    database: Database, tenants: TenantService, caplog: pytest.LogCaptureFixture
) -> None:
    server = RedisServer(BUNDLED)
    server.start()
    gateway = Gateway(database, server.url)
    gateway.listener.start()
    await have_found_their_place([gateway])
    redis = connect(server.url, max_connections=1)
    keys = KeyService(database, ChangeAnnouncer(redis))
    key = await keys.create("acme", name="web")
    assert await gateway.accepts(key)
    server.stop()
    await until_it_waits_to_retry(caplog)
    assert await gateway.accepts(key)
    server.start()
    await keys.revoke("acme", key.record.id)
    await until_refused([gateway], key)
    await gateway.aclose()
    await redis.aclose()
    server.close()


async def test_listener_may_start_before_redis(
    database: Database, key: CreatedKey, caplog: pytest.LogCaptureFixture
) -> None:
    server = RedisServer(BUNDLED)
    gateway = Gateway(database, server.url)
    gateway.listener.start()
    await until_it_waits_to_retry(caplog)
    assert await gateway.accepts(key)
    server.start()
    await have_found_their_place([gateway])
    await gateway.aclose()
    server.close()


async def test_listener_stops_at_any_moment(
    database: Database, redis: Redis, redis_server: RedisServer
) -> None:
    gateway = Gateway(database, redis_server.url)
    async with asyncio.timeout(PATIENCE_SECONDS):
        for number in range(25):
            gateway.listener.start()
            await redis.xadd(KEY_EVENTS, {"key": f"key_{number}"})
            await asyncio.sleep(number * 0.0008)
            await gateway.listener.stop()
    assert gateway.listener._task is None
    await gateway.aclose()


async def test_stream_stays_bounded(redis: Redis) -> None:
    announcer = ChangeAnnouncer(redis)
    pipeline = redis.pipeline(transaction=False)
    for number in range(10_300):
        pipeline.execute_command("XADD", KEY_EVENTS, "*", "key", f"key_{number}")
    await pipeline.execute()
    for number in range(200):
        await announcer.key_changed(f"key_{number}")
    assert 10_000 <= await redis.xlen(KEY_EVENTS) < 10_300
