"""The drain: every record reaches the ledger exactly once, despite failures."""

import asyncio
from functools import partial
from typing import Any

import pytest
from msgspec import structs
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from sqlalchemy import func, select

from contract import keys
from gateway.accounts.spend_limits import SpendLimitService
from gateway.accounts.tenants.service import TenantService
from gateway.billing.ledger.drain import Drain
from gateway.billing.ledger.store import BATCH, read_balances
from gateway.limits.seeding import Seeder
from gateway.limits.store import QuotaStore
from gateway.platform.changes import ChangeAnnouncer
from gateway.platform.database import schema
from gateway.platform.database.engine import Database
from gateway.platform.database.tables import LedgerRow
from gateway.records.errors import StoreUnavailableError
from gateway.records.limits import SpendScope, Window
from gateway.records.times import to_ms, utc_now
from gateway.records.usage_record import Outcome, UsageRecord, encode_usage
from tests.gateway.jobs.conftest import Append, undrained
from tests.support.kinds import every_database
from tests.support.postgres_server import PostgresServer
from tests.support.redis_server import RedisServer
from tests.support.usage import usage_record

BUCKET = keys.bucket_of("acme")


def _records(count: int, *, start: int = 0) -> list[UsageRecord]:
    """Records of many tenants, and so of many buckets."""
    return [usage_record(n, tenant_id=f"tenant-{n % 23}") for n in range(start, start + count)]


async def _ledger(database: Database) -> dict[str, int]:
    async with database.reading() as transaction:
        rows = await transaction.execute(select(LedgerRow.request_id, LedgerRow.cost_micros))
        found = [(request_id, cost) for request_id, cost in rows]
    assert len(found) == len(dict(found)), "a request is in the ledger twice"
    return dict(found)


def _expected(records: list[UsageRecord]) -> dict[str, int]:
    return {record.request_id: record.cost_micros for record in records}


@every_database
async def test_all_records_of_all_buckets_reach_the_ledger(
    database: Database, redis: Redis, append: Append
) -> None:
    records = _records(2 * BATCH + 7)
    await append(*records)
    drain = Drain(redis, database)
    assert await drain.run() == len(records)
    assert await _ledger(database) == _expected(records)
    assert await undrained(redis) == 0
    assert await drain.run() == 0


async def test_several_pages_of_one_bucket_are_drained_in_one_run(
    database: Database, redis: Redis, append: Append
) -> None:
    records = [usage_record(number) for number in range(3 * BATCH)]
    await append(*records)
    assert await Drain(redis, database).run() == len(records)
    assert await undrained(redis) == 0


async def test_run_ends_when_its_time_is_over(
    database: Database, redis: Redis, append: Append
) -> None:
    await append(*(usage_record(number) for number in range(3 * BATCH)))
    assert await Drain(redis, database).run(seconds=0) == BATCH
    assert await undrained(redis) == 2 * BATCH


@every_database
async def test_first_of_two_records_of_a_request_counts(
    database: Database, redis: Redis, append: Append
) -> None:
    first = usage_record(1)
    second = usage_record(1, cost_micros=0, outcome=Outcome.LOST)
    await append(first, second)
    assert await Drain(redis, database).run() == 1
    await append(second)
    assert await Drain(redis, database).run() == 0
    assert await _ledger(database) == _expected([first])
    assert await undrained(redis) == 0


async def test_death_between_commit_and_removal_counts_nothing_twice(
    database: Database, redis: Redis, append: Append, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = _records(60)
    await append(*records)
    pipeline = redis.pipeline

    def broken(*args: Any, **kwargs: Any) -> Any:
        made: Any = pipeline(*args, **kwargs)
        execute = made.execute

        async def dies(*arguments: Any, **options: Any) -> Any:
            if any(command[0][0] == "XDEL" for command in made.command_stack):
                raise RedisConnectionError("the process dies here")
            return await execute(*arguments, **options)

        made.execute = dies
        return made

    with monkeypatch.context() as patched:
        patched.setattr(redis, "pipeline", broken)
        with pytest.raises(RedisConnectionError):
            await Drain(redis, database).run()
    assert await _ledger(database) == _expected(records)
    assert await undrained(redis) == 60
    assert await Drain(redis, database).run() == 0
    assert await _ledger(database) == _expected(records)
    assert await undrained(redis) == 0


@every_database
async def test_concurrent_drains_are_harmless(
    database: Database, redis: Redis, append: Append
) -> None:
    records = _records(600)

    async def fill() -> None:
        for start in range(0, len(records), 100):
            await append(*records[start : start + 100])
            await asyncio.sleep(0.01)

    async def drain() -> int:
        return sum([await Drain(redis, database).run() for _ in range(6)])

    await asyncio.gather(fill(), drain(), drain(), drain())
    await Drain(redis, database).run()
    assert await _ledger(database) == _expected(records)
    assert await undrained(redis) == 0


@pytest.mark.parametrize(
    "content",
    [
        {"u": b"no msgpack"},
        {"u": b""},
        {"x": b"another field"},
        {"u": encode_usage(usage_record(5, prompt_tokens=-3))},
        {"u": encode_usage(usage_record(5, created_ms=2**60))},
    ],
    ids=["garbage", "empty", "no field", "negative", "far future"],
)
async def test_unreadable_entry_is_set_aside_and_blocks_nothing(
    database: Database,
    redis: Redis,
    append: Append,
    content: dict[Any, Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    await append(usage_record(1))
    entry_id = await redis.xadd(keys.usage(BUCKET), content)
    await append(usage_record(2))
    assert await Drain(redis, database).run() == 2
    assert await undrained(redis) == 0
    kept: Any = await redis.hgetall(keys.unreadable_usage(BUCKET))
    assert list(kept) == [entry_id]
    if content.get("u"):
        assert kept[entry_id] == content["u"]
    assert "is unreadable" in caplog.text


async def test_database_outage_keeps_everything_in_redis(
    redis: Redis, append: Append, tmp_path: Any
) -> None:
    await append(*_records(30))
    database = Database(f"postgresql+asyncpg://postgres@/none?host={tmp_path}")
    with pytest.raises(StoreUnavailableError):
        await Drain(redis, database).run()
    assert await undrained(redis) == 30
    await database.aclose()


@pytest.mark.long
async def test_records_during_a_postgresql_outage_reach_the_ledger_later(
    redis: Redis, append: Append
) -> None:
    server = await asyncio.to_thread(PostgresServer)
    try:
        url = await asyncio.to_thread(server.create_database)
        await schema.upgrade(url)
        database = Database(url)
        drain = Drain(redis, database)
        records = _records(300)
        await append(*records[:100])
        assert await drain.run() == 100
        await asyncio.to_thread(server.stop)
        for start in (100, 150):
            await append(*records[start : start + 50])
            with pytest.raises(StoreUnavailableError):
                await drain.run()
        assert await undrained(redis) == 100
        await asyncio.to_thread(server.start)
        await append(*records[200:])
        assert await drain.run() == 200
        assert await _ledger(database) == _expected(records)
        await database.aclose()
    finally:
        await asyncio.to_thread(server.close)


async def test_drain_works_on_a_cluster(database: Database, any_redis_server: RedisServer) -> None:
    client = Redis.from_url(any_redis_server.url)
    await client.flushall()
    records = _records(100)
    for record in records:
        stream = keys.usage(keys.bucket_of(record.tenant_id))
        await client.xadd(stream, {"u": encode_usage(record)})
    await client.xadd(keys.usage(BUCKET), {"u": b"no msgpack"})
    assert await Drain(client, database).run() == 100
    assert await undrained(client) == 0
    async with database.reading() as transaction:
        assert await transaction.scalar(select(func.count()).select_from(LedgerRow)) == 100
    await client.aclose()


async def test_limit_that_a_request_did_not_know_is_derived_again(
    database: Database, redis: Redis, append: Append
) -> None:
    """It was added while the request ran, so that the settlement did not charge it."""
    announcer = ChangeAnnouncer(redis)
    await TenantService(database, announcer).create("acme", tenant_id="acme")
    quotas = QuotaStore(redis)
    seeder = Seeder(quotas, partial(read_balances, database))
    service = SpendLimitService(database, announcer, seeder)
    limits = [
        await service.add("acme", scope=SpendScope.TENANT, window=window, amount_micros=500)
        for window in (Window.MONTH, Window.DAY)
    ]
    admitted_ms = to_ms(utc_now())
    subjects = [each.subject_at(admitted_ms) for each in limits]
    await seeder.seed("acme", subjects)
    record = usage_record(1, cost_micros=70, created_ms=admitted_ms)
    await append(structs.replace(record, spend_limits=(subjects[1].subject,)))
    await Drain(redis, database).run()
    assert [each.is_seeded for each in await quotas.status("acme", subjects)] == [False, True]
    assert [each.used_micros for each in await service.uses("acme", limits)] == [70, 0]
