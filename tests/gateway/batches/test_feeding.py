"""How many lines wait in the queue, and whose lines are next."""

import asyncio
from dataclasses import replace
from datetime import datetime, timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest
from redis.asyncio import Redis
from sqlalchemy import func, select
from typing_extensions import override

from common.tasks import end_task
from contract import keys
from contract.messages import JobFailed
from contract.outcomes import FailureCode
from contract.tier import Lane, ServiceTier
from gateway.accounts.tenants.service import TenantService
from gateway.batches.chunk_runner import BatchRunner, runs_again, tier_of
from gateway.batches.feeding import LEAST_WAITING, STEP, Feeder
from gateway.batches.line_runner import BatchState, Line, LineRunner
from gateway.batches.store import BatchStore, Progress
from gateway.completions.rendering.failures import to_api_error
from gateway.models.catalogue import Catalogue
from gateway.platform.changes import ChangeAnnouncer
from gateway.platform.database.engine import Database
from gateway.platform.database.tables import BatchChunkRow, BatchFeedRow
from gateway.platform.redis_client import MeasuredConnection
from gateway.platform.settings import Settings
from gateway.records.batches import Batch, BatchStatus, Chunk, ChunkState
from gateway.records.errors import OverloadedError
from gateway.records.times import MAX_MS, to_time, utc_now
from tests.support.fake_worker import FakeWorker
from tests.support.kinds import every_database

LINES = 32
"""Of each chunk."""
RELEASED = {b"lines": b"released"}


@pytest.fixture(autouse=True)
async def _tenants(database: Database, redis: "Redis") -> None:
    for tenant in ("acme", "other"):
        await TenantService(database, ChangeAnnouncer(redis)).create(tenant, tenant_id=tenant)


@pytest.fixture
def feeder(database: Database, redis: "Redis") -> Feeder:
    """A feeder of an idle queue."""
    catalogue = Catalogue(MeasuredConnection(redis))
    return Feeder(redis, database, catalogue, ChangeAnnouncer(redis))


_numbers = iter(range(1000))


async def running_batch(
    database: Database, tenant: str = "acme", *, chunks: int = 10, hours: int = 24
) -> str:
    """Store a running batch; return its id."""
    now = utc_now()
    names = dict.fromkeys(Batch.__dataclass_fields__)
    values: dict[str, Any] = names | {
        "id": f"batch_{next(_numbers)}",
        "tenant_id": tenant,
        "credential_id": "key_1",
        "endpoint": "/v1/completions",
        "input_file_id": "file-1",
        "completion_window": "24h",
        "status": BatchStatus.IN_PROGRESS,
        "created_at": now,
        "in_progress_at": now,
        "expires_at": now + timedelta(hours=hours),
        "models": ["m"],
        "total": chunks * LINES,
    }
    counts = ("completed", "failed", "tokens", "prompt_tokens", "cached_tokens", "attempts")
    values |= dict.fromkeys((*counts, "completion_tokens", "reasoning_tokens", "cost_micros"), 0)
    batch = Batch(**values)
    async with database.writing() as transaction:
        store = BatchStore(transaction)
        await store.add(batch)
        await store.add_chunks(
            [
                Chunk(
                    batch_id=batch.id,
                    number=number,
                    first_line=number * LINES + 1,
                    lines=LINES,
                    start=0,
                    size=1,
                )
                for number in range(chunks)
            ]
        )
    return batch.id


async def released(database: Database, batch_id: str) -> int:
    """Return the released lines of a batch that no gateway runs."""
    chunk = BatchChunkRow
    of_batch = chunk.batch_id == batch_id, chunk.state == ChunkState.RELEASED, chunk.gateway == ""
    async with database.reading() as transaction:
        return await transaction.scalar(select(func.sum(chunk.lines)).where(*of_batch)) or 0


async def announced(redis: "Redis") -> list[dict[bytes, bytes]]:
    """Return what was announced to gateways."""
    entries: Any = await redis.xrange(keys.KEY_EVENTS)
    return [fields for _, fields in entries]


async def claim_all(database: Database) -> int:
    """Claim what is released, as a gateway does; return the number of chunks."""
    async with database.writing() as transaction:
        return len(await BatchStore(transaction).claim_chunks("gw-1", utc_now(), limit=1000))


def runner_of(database: Database) -> BatchRunner:
    """Return a gateway's runner, whose lines cannot run."""
    none: Any = None
    gateway, drain = SimpleNamespace(gateway="gw-1"), SimpleNamespace(is_draining=False)
    others: Any = [none, gateway, LineRunner(*[none] * 9), none, drain]
    return BatchRunner(Settings(), database, *others)


async def a_second_later(database: Database, **columns: Any) -> None:
    """Let the next run of the feeder measure again."""
    async with database.writing() as transaction:
        for feed in await transaction.scalars(select(BatchFeedRow)):
            feed.measured_at -= timedelta(seconds=2)
            for name, value in columns.items():
                setattr(feed, name, value)


@every_database
async def test_each_tenant_has_its_own_window_and_early_deadlines_go_first(
    feeder: Feeder, database: Database, redis: "Redis"
) -> None:
    assert await feeder.run() == 0
    late = await running_batch(database)
    early = await running_batch(database, chunks=1, hours=1)
    others = await running_batch(database, "other")
    await feeder.run()
    assert await released(database, early) == LINES
    assert await released(database, late) == LEAST_WAITING - LINES
    assert await released(database, others) == LEAST_WAITING
    assert await feeder.run() == 0
    # Idle gateways wait for the announcement of released lines.
    assert await announced(redis) == [RELEASED]
    assert await claim_all(database) == 2 * LEAST_WAITING // LINES
    # Claimed lines no longer wait here; those in the queue do.
    assert await claim_all(database) == 0
    assert await feeder.run() == 2 * LEAST_WAITING


async def test_tenant_that_cannot_be_fed_delays_no_other(
    feeder: Feeder, database: Database, redis: "Redis", monkeypatch: pytest.MonkeyPatch
) -> None:
    bad, good = await running_batch(database), await running_batch(database, "other")
    release = BatchStore.release

    async def broken(store: BatchStore, tenant_id: str, lines: int, now: datetime) -> int:
        return await release(store, tenant_id, lines // (tenant_id != "acme"), now)

    monkeypatch.setattr(BatchStore, "release", broken)
    with pytest.raises(ZeroDivisionError):
        await feeder.run()
    assert (await released(database, bad), await released(database, good)) == (0, LEAST_WAITING)
    assert await announced(redis) == [RELEASED]


@every_database
async def test_chunk_is_leased_before_a_thousand_released_ones_of_another_tenant(
    database: Database,
) -> None:
    for tenant, chunks in (("acme", 1000), ("other", 1)):
        await running_batch(database, tenant, chunks=chunks)
        async with database.writing() as transaction:
            await BatchStore(transaction).release(tenant, chunks * LINES, utc_now())
    async with database.writing() as transaction:
        found = await BatchStore(transaction).claim_chunks("gw-1", utc_now(), limit=2)
    assert {each.batch.tenant_id for each in found} == {"acme", "other"}
    # The last places of a gateway are for tenants that it does not serve.
    async with database.writing() as transaction:
        store = BatchStore(transaction)
        assert not await store.claim_chunks("gw-1", utc_now(), limit=2, besides={"acme"})


async def test_lines_that_wait_in_the_queue_fill_the_window(
    feeder: Feeder, database: Database, redis: "Redis"
) -> None:
    await FakeWorker(redis, "m").announce()
    await redis.zadd(
        keys.queue("m", "acme", Lane.BATCH), {f"job{each}": each for each in range(40)}
    )
    batch = await running_batch(database)
    await feeder.run()
    # Whole chunks are released, at least for the lines that are missing.
    assert await released(database, batch) == LINES
    assert LEAST_WAITING - 40 <= LINES


def test_late_batch_is_promoted_tier_by_tier() -> None:
    now = utc_now()
    values: dict[str, Any] = {
        **dict.fromkeys(Batch.__dataclass_fields__),
        "status": BatchStatus.IN_PROGRESS,
        "created_at": now,
        "in_progress_at": now,
        "expires_at": now + timedelta(hours=10),
        "total": 100,
        "completed": 50,
        "failed": 0,
    }
    batch = Batch(**values)
    hours = {4: "batch", 7: "batch", 8: "flex", 9.5: "default", 11: "default"}
    tiers = {each: tier_of(batch, now + timedelta(hours=each)).value for each in hours}
    assert tiers == hours
    in_time = replace(batch, completed=99)
    assert tier_of(in_time, now + timedelta(hours=9.5)) is ServiceTier.BATCH
    slow = replace(batch, total=1_000_000, completed=1)
    assert slow.projected_end(now + timedelta(days=3)) == to_time(MAX_MS)


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (FailureCode.ENGINE_ERROR, [True, True, False, False]),
        # The line has not failed: another gateway continues it, or it never ran.
        (FailureCode.TAKEN_OVER, [True] * 4),
        (FailureCode.NO_WORKER, [True] * 4),
        (FailureCode.POISONOUS, [False] * 4),
    ],
)
def test_line_runs_again_unless_it_failed_often(code: FailureCode, expected: list[bool]) -> None:
    error = to_api_error(JobFailed(0, 0, code, ""))
    assert [runs_again(error, times) for times in (1, 2, 3, 1_000)] == expected


async def test_window_grows_while_the_queue_runs_dry_and_halves_when_pushed_back(
    feeder: Feeder, database: Database
) -> None:
    batch = await running_batch(database, chunks=100)

    async def target() -> int:
        async with database.reading() as transaction:
            feed = await transaction.scalar(select(BatchFeedRow))
            return -1 if feed is None else feed.target

    await feeder.run()
    await claim_all(database)
    # Nothing has ended, so a larger window would only hold more lines.
    await a_second_later(database)
    await feeder.run()
    assert await target() == LEAST_WAITING
    for turn in range(1, 3):
        await claim_all(database)
        async with database.writing() as transaction:
            await BatchStore(transaction).change(batch, completed=1000 * turn)
        await a_second_later(database)
        await feeder.run()
        assert await target() == LEAST_WAITING + turn * STEP
    await claim_all(database)
    await a_second_later(database, pushed_back_at=utc_now())
    # Gateways hold lines that are in no queue, so nothing is added to them.
    assert await feeder.run() == 0
    assert await target() == (LEAST_WAITING + 2 * STEP) // 2
    await a_second_later(database, pushed_back_at=utc_now() - timedelta(seconds=6))
    assert await feeder.run() > 0


async def test_chunks_of_a_gateway_without_heartbeats_are_free_before_their_leases_end(
    feeder: Feeder, database: Database, redis: "Redis"
) -> None:
    await running_batch(database, chunks=1)
    await running_batch(database, "other", chunks=1)
    await feeder.run()
    async with database.writing() as transaction:
        store = BatchStore(transaction)
        (first,) = await store.claim_chunks("gw-1", utc_now(), limit=1)
        await store.claim_chunks("gw-2", utc_now(), limit=1)
    for gateway in ("gw-1", "gw-2"):
        await redis.set(keys.gateway_alive(gateway), 1)
    await feeder.run()
    await redis.delete(keys.gateway_alive("gw-1"))
    # After an outage of Redis, living gateways lack a heartbeat for a moment.
    await feeder.run()
    assert await claim_all(database) == 0
    await redis.delete(keys.KEY_EVENTS)
    await feeder.run()
    assert await announced(redis) == [RELEASED]
    async with database.writing() as transaction:
        (again,) = await BatchStore(transaction).claim_chunks("gw-3", utc_now(), limit=9)
    assert again == first


@every_database
async def test_chunk_of_a_dead_gateway_is_claimed_again_and_ends_once(
    feeder: Feeder, database: Database
) -> None:
    await running_batch(database, chunks=1)
    await feeder.run()
    async with database.writing() as transaction:
        (first,) = await BatchStore(transaction).claim_chunks("gw-1", utc_now(), limit=9)
    later = utc_now() + timedelta(minutes=1)
    async with database.writing() as transaction:
        (second,) = await BatchStore(transaction).claim_chunks("gw-2", later, limit=9)
    assert second == first
    async with database.writing() as transaction:
        store = BatchStore(transaction)
        # The first gateway lives after all; it may end the lines, but not renew their lease.
        await store.renew("gw-1", [first.chunk], later, lease=timedelta(days=1))
        assert not await store.lost("gw-2", [second.chunk])
        assert await store.finish_chunks([first.chunk], Progress(completed=LINES), gateway="gw-1")
        # The second gateway stops its lines, whose responses the first one deletes.
        assert await store.lost("gw-2", [second.chunk]) == {(second.batch.id, second.chunk.number)}
        assert not await store.finish_chunks([second.chunk], Progress(completed=LINES))
        lease, state = (
            await transaction.execute(select(BatchChunkRow.leased_until, BatchChunkRow.state))
        ).one()
        assert lease < later + timedelta(hours=1)
        assert state is ChunkState.DONE


async def test_chunks_leave_nothing_however_they_end(
    feeder: Feeder,
    database: Database,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    ended = asyncio.Event()
    runner = runner_of(database)
    monkeypatch.setattr(runner, "_run_chunk", lambda *_: ended.wait())
    await running_batch(database, chunks=2)
    await feeder.run()
    await runner._turn(renews=False)
    await runner.aclose()  # Before the chunks have made their first step.
    assert not runner._running

    await runner._turn(renews=False)
    assert len(runner._running) == 2
    lost = BatchStore.lost

    async def end(store: BatchStore, *arguments: Any) -> Any:
        ended.set()
        while runner._running:
            await asyncio.sleep(0)
        return await lost(store, *arguments)

    monkeypatch.setattr(BatchStore, "lost", end)
    await runner._turn(renews=True)  # They end while their batch is read.
    assert not runner._states()
    assert not caplog.records


async def test_batch_that_cannot_be_looked_at_keeps_no_other_from_its_lease(
    feeder: Feeder,
    database: Database,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    runner = runner_of(database)
    monkeypatch.setattr(runner, "_run_chunk", lambda *_: asyncio.Event().wait())
    for tenant in ("acme", "other"):
        await running_batch(database, tenant, chunks=1)
    await feeder.run()
    await runner._turn(renews=False)

    async def leases() -> set[datetime]:
        async with database.reading() as transaction:
            return set(await transaction.scalars(select(BatchChunkRow.leased_until)))

    before = await leases()
    monkeypatch.setattr(Batch, "projected_end", lambda *_: 1 / 0)
    await runner._turn(renews=True)
    assert before.isdisjoint(await leases())
    assert len(caplog.records) == 2
    # Not even an error that concerns all batches ends the gateway.
    failing = asyncio.Event()

    async def fail(*_: Any, **__: Any) -> None:
        failing.set()
        raise ZeroDivisionError

    monkeypatch.setattr(runner, "_watch", fail)
    running = asyncio.create_task(runner.run())
    await failing.wait()
    failing.clear()
    await failing.wait()
    await end_task(running)
    await runner.aclose()


async def test_lines_of_a_tenant_begin_in_turn_with_the_lines_of_others() -> None:
    begun = list[str]()

    class Runner(LineRunner):
        @override
        async def _call(self, line: Line, principal: Any, tier: Any) -> Any:
            begun.append(line.batch.tenant_id)
            await asyncio.sleep(0.001)
            raise OverloadedError("", retry_after_seconds=1.0)

    runner: Any = Runner(*cast("Any", [None] * 9))
    names = dict.fromkeys(Batch.__dataclass_fields__)

    def lines(tenant: str, number: int) -> list[Any]:
        values: dict[str, Any] = names | {"id": f"batch_{tenant}", "tenant_id": tenant}
        state = BatchState(Batch(**values))
        return [runner.run(Line(state, each, b"{}"), None, "batch") for each in range(number)]

    await asyncio.gather(*lines("many", 100), *lines("few", 5), return_exceptions=True)
    assert len(begun) == 105
    assert begun[:30].count("few") == 5
