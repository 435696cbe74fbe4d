"""The ledger: the first row of a request counts, rows stay, and each month has a partition."""

import asyncio
from datetime import UTC, datetime

import pytest
from sqlalchemy import func, select, text
from sqlalchemy.exc import DBAPIError, IntegrityError

from contract.tier import ServiceTier
from gateway.billing.ledger.drain import UnusableRecordError, row_of
from gateway.billing.ledger.store import LedgerStore, PeriodUsage
from gateway.limits.seeding import Recorded
from gateway.platform.database.engine import Database
from gateway.platform.database.tables import DirtyHourRow, LedgerRow
from gateway.records.errors import StoreUnavailableError
from gateway.records.limits import Limits, LimitScope, SubjectLimits
from gateway.records.usage_record import Outcome, UsageRecord
from tests.support.cases import all_cases
from tests.support.kinds import every_database
from tests.support.usage import HOUR_MS, NOON_MS, usage_record

NOON = datetime(2026, 11, 20, 12, tzinfo=UTC)


async def _insert(database: Database, *records: UsageRecord) -> int:
    async with database.writing() as transaction:
        lines = {record.request_id for record in records if record.line}
        rows = [row_of(record) for record in records]
        return await LedgerStore(transaction).insert(rows, lines=lines)


async def _marked_hours(database: Database) -> list[datetime]:
    async with database.reading() as transaction:
        return list(await transaction.scalars(select(DirtyHourRow.hour).order_by(DirtyHourRow.id)))


async def _count(database: Database) -> int:
    async with database.reading() as transaction:
        return await transaction.scalar(select(func.count()).select_from(LedgerRow)) or 0


@every_database
async def test_row_has_every_field_of_the_record(database: Database) -> None:
    record = usage_record(
        7,
        project_id=None,
        service_tier=ServiceTier.FLEX,
        is_streamed=True,
        is_prepaid=True,
        adapter="poet",
        jobs=3,
        prompt_price=150_000,
        cached_price=75_000,
        completion_price=600_000,
        outcome=Outcome.TIMED_OUT,
        code="generation_timeout",
        first_token_ms=42,
        engine="vllm 0.32.0",
        preemptions=3,
        recomputed_tokens=4,
        exactness_class="438df8cab49b, 0c5e2f7a91d3",
        class_crossings=2,
        audio_price=100,
        audio_seconds=31,
        free_audio_seconds=30,
        job_seconds=[30, 1],
        end_user="ada",
        spend_limits=("s:spl_1",),
    )
    assert await _insert(database, record) == 1
    async with database.reading() as transaction:
        row = (await transaction.scalars(select(LedgerRow))).one()
    unlike = ("line", "ledger_id", "adapter", "is_ranked", "model", "job_seconds", "spend_limits")
    for field in UsageRecord.__struct_fields__:
        if not field.endswith("ed_ms") and field not in unlike:
            assert getattr(row, field) == getattr(record, field), field
    assert row.model == f"{record.model}:poet"
    assert (row.created_at.timestamp() * 1000, row.ended_at.timestamp() * 1000) == (
        record.created_ms,
        record.ended_ms,
    )


@every_database
async def test_later_row_that_has_no_more_adds_nothing(database: Database) -> None:
    first, other = usage_record(1), usage_record(2)
    copy = usage_record(1, cost_micros=99, outcome=Outcome.LOST)
    assert await _insert(database, first, copy, other) == 2
    assert await _insert(database, copy, other) == 0
    assert await _marked_hours(database) == [NOON], "a duplicate marks no hour"
    async with database.reading() as transaction:
        costs = select(LedgerRow.request_id, LedgerRow.cost_micros).order_by(LedgerRow.request_id)
        assert [tuple(row) for row in await transaction.execute(costs)] == [
            (first.request_id, 101),
            (other.request_id, 102),
        ]


@every_database
@pytest.mark.parametrize("at_once", [False, True], ids=["later", "at once"])
@pytest.mark.parametrize("outcome", [Outcome.FINISHED, Outcome.LOST])
async def test_request_settled_as_lost_is_charged_when_a_gateway_settles_it(
    database: Database, *, at_once: bool, outcome: Outcome
) -> None:
    lost = usage_record(
        1,
        outcome=Outcome.LOST,
        prompt_tokens=10,
        cached_tokens=0,
        completion_tokens=5,
        free_prompt_tokens=10,
        free_completion_tokens=5,
        cost_micros=0,
    )
    settled = usage_record(
        1,
        outcome=outcome,
        prompt_tokens=10,
        cached_tokens=4,
        completion_tokens=9,
        cost_micros=77,
        first_token_ms=40,
    )
    if at_once:
        assert await _insert(database, lost, settled, settled) == 2
    else:
        assert await _insert(database, lost) == 1
        assert await _insert(database, lost) == 0
        assert await _insert(database, settled) == 1
    assert await _insert(database, settled, lost, settled) == 0
    async with database.reading() as transaction:
        rows = list(await transaction.scalars(select(LedgerRow).order_by(LedgerRow.request_id)))
    assert [row.request_id for row in rows] == [lost.request_id, f"{lost.request_id}.late"]
    for name in ("prompt_tokens", "cached_tokens", "completion_tokens"):
        assert sum(getattr(row, name) for row in rows) == getattr(settled, name)
        assert sum(getattr(row, f"free_{name}") for row in rows) == 0
    assert [row.first_token_ms for row in rows] == [0, 40]
    assert [row.cost_micros for row in rows] == [0, 77]
    assert rows[1].outcome is outcome


@every_database
async def test_row_that_a_later_one_of_its_request_exceeds_is_supplemented(
    database: Database,
) -> None:
    def row(outcome: Outcome, cached: int, completion: int) -> UsageRecord:
        return usage_record(
            1,
            outcome=outcome,
            prompt_tokens=10,
            cached_tokens=cached,
            completion_tokens=completion,
            cost_micros=100 - cached + completion,
            first_token_ms=8 + completion,
        )

    assert await _insert(database, row(Outcome.CANCELLED, 4, 5)) == 1
    assert await _insert(database, row(Outcome.FINISHED, 6, 5)) == 0  # Only more is cached.
    assert await _insert(database, row(Outcome.LOST, 0, 7), row(Outcome.FINISHED, 0, 9)) == 2
    assert await _insert(database, row(Outcome.FINISHED, 0, 9), row(Outcome.FINISHED, 0, 8)) == 0
    async with database.reading() as transaction:
        rows = list(await transaction.scalars(select(LedgerRow).order_by(LedgerRow.request_id)))
    request_id = rows[0].request_id
    found = [
        (each.request_id, each.completion_tokens, each.cost_micros, each.first_token_ms)
        for each in rows
    ]
    assert found == [
        (request_id, 5, 101, 13),
        (f"{request_id}.late", 2, 6, 0),
        (f"{request_id}.late2", 2, 2, 0),
    ]


@every_database
@pytest.mark.parametrize("days", [0, 40], ids=["an hour later", "in another month"])
async def test_line_that_runs_again_at_another_time_is_charged_once(
    database: Database, days: int
) -> None:
    def run(hours: int, tokens: int) -> UsageRecord:
        created_ms = NOON_MS + (24 * days + hours) * HOUR_MS
        return usage_record(
            1,
            line="batch_1:1",
            created_ms=created_ms,
            prompt_tokens=10,
            cached_tokens=0,
            completion_tokens=tokens,
            cost_micros=10 + tokens,
        )

    assert await _insert(database, run(0, 5), run(1, 5)) == 1
    assert (
        await asyncio.gather(*(_insert(database, run(hours, 5)) for hours in range(4))) == [0] * 4
    )
    assert await _insert(database, run(5, 7)) == 1
    async with database.reading() as transaction:
        rows = list(await transaction.scalars(select(LedgerRow)))
    assert sum(row.cost_micros for row in rows) == 17
    assert len({row.created_at for row in rows}) == 1


@every_database
async def test_rows_added_concurrently_are_added_once(database: Database) -> None:
    records = [usage_record(number) for number in range(300)]
    added = await asyncio.gather(
        *(_insert(database, *reversed(records) if turn % 2 else records) for turn in range(4))
    )
    assert sum(added) == 300
    assert await _count(database) == 300


@every_database
async def test_failed_insert_adds_nothing(database: Database) -> None:
    bad = row_of(usage_record(2)) | {"tenant_id": None}
    with pytest.raises(IntegrityError):
        async with database.writing() as transaction:
            await LedgerStore(transaction).insert([row_of(usage_record(1)), bad])
    assert await _count(database) == 0
    assert await _marked_hours(database) == []


@every_database
@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE usage_ledger SET cost_micros = 0",
        "DELETE FROM usage_ledger",
        "DELETE FROM usage_ledger WHERE tenant_id = 'acme'",
    ],
)
async def test_rows_cannot_be_changed_or_removed(database: Database, statement: str) -> None:
    await _insert(database, usage_record(1))
    with pytest.raises((StoreUnavailableError, DBAPIError)) as caught:
        async with database.writing() as transaction:
            await transaction.execute(text(statement))
    assert "only ever added" in str(caught.value.__cause__ or caught.value)
    assert await _count(database) == 1


@every_database
async def test_each_month_gets_a_partition_on_first_use(database: Database) -> None:
    months = [usage_record(n, created_ms=NOON_MS + n * 20 * 24 * HOUR_MS) for n in range(5)]
    edges = [
        usage_record(11, created_ms=int(datetime(2026, 12, 1, tzinfo=UTC).timestamp() * 1000)),
        usage_record(12, created_ms=int(datetime(2026, 12, 1, tzinfo=UTC).timestamp() * 1000) - 1),
    ]
    await asyncio.gather(_insert(database, *months), _insert(database, *edges))
    assert await _count(database) == 7
    if database.engine.dialect.name != "postgresql":
        return
    async with database.reading() as transaction:
        rows = await transaction.execute(
            text(
                "SELECT tableoid::regclass::text, count(*) FROM usage_ledger GROUP BY 1 ORDER BY 1"
            )
        )
        assert [tuple(row) for row in rows] == [
            ("usage_ledger_2026_11", 2),
            ("usage_ledger_2026_12", 3),
            ("usage_ledger_2027_01", 1),
            ("usage_ledger_2027_02", 1),
        ]
    with pytest.raises((StoreUnavailableError, DBAPIError)):
        async with database.writing() as transaction:
            await transaction.execute(text("DELETE FROM usage_ledger_2026_12"))


@all_cases(
    "fields",
    [
        {"prompt_tokens": -1},
        {"cost_micros": 2**63},
        {"created_ms": -1},
        {"created_ms": 2**62},
        {"ended_ms": 2**62},
    ],
    ids=str,
)
def test_record_that_no_database_can_store_is_identified(fields: dict[str, int]) -> None:
    with pytest.raises(UnusableRecordError):
        row_of(usage_record(1, **fields))


@every_database
async def test_unusual_texts_are_stored(database: Database) -> None:
    strange = usage_record(1, credential_id="jwt:\0" + "x" * 5000, code="é" * 400)
    assert await _insert(database, strange) == 1


@every_database
async def test_usage_is_read_by_holder_and_time(database: Database) -> None:
    await _insert(
        database,
        usage_record(1, completion_tokens=1, cost_micros=50),
        usage_record(1),  # What it has more is no further request.
        usage_record(2, project_id="prj_2", audio_seconds=7),
        usage_record(3, credential_id="key_2", created_ms=NOON_MS + HOUR_MS),
        usage_record(4, tenant_id="other", credential_id="key_1"),
    )
    noon, one = NOON, NOON.replace(hour=13)

    async def usage(scope: LimitScope, holder: str) -> PeriodUsage:
        async with database.reading() as transaction:
            return await LedgerStore(transaction).usage_between(
                "acme", SubjectLimits(scope, holder, Limits()), start=noon, end=one
            )

    assert await usage(LimitScope.TENANT, "acme") == PeriodUsage(2, 13 + 15, 7, 101 + 102)
    assert await usage(LimitScope.PROJECT, "prj_2") == PeriodUsage(1, 15, 7, 102)
    assert await usage(LimitScope.KEY, "key_1") == PeriodUsage(2, 28, 7, 203)
    assert await usage(LimitScope.KEY, "key_2") == PeriodUsage(0, 0, 0, 0)


async def test_usage_of_known_requests_is_found(database: Database) -> None:
    more = usage_record(2, completion_tokens=50, cost_micros=500, audio_seconds=3)
    await _insert(database, usage_record(1), usage_record(2), more)
    asked = {usage_record(n).request_id for n in range(2, 12_000)}
    async with database.reading() as transaction:
        store = LedgerStore(transaction)
        tokens = more.prompt_tokens + more.completion_tokens
        assert await store.known(asked) == {more.request_id: Recorded(tokens, 3, 500)}
        assert await store.known([]) == {}
