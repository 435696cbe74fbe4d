"""Usage reports equal sums over the ledger's rows, whatever is summed up already."""

import asyncio
import random
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import datetime, timedelta
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import update
from sqlalchemy.ext.asyncio import AsyncSession

from contract.tier import ServiceTier
from gateway.accounts.tenants.service import TenantService
from gateway.billing.invoices import InvoiceService
from gateway.billing.ledger.rollups import Rollups
from gateway.billing.usage import service as usage_service
from gateway.billing.usage.parts import Dimension, UsageFilter, UsageSums
from gateway.billing.usage.parts import add as sum_of
from gateway.billing.usage.periods import DAY, HOUR, Bucket, Span
from gateway.billing.usage.service import (
    LatencyBody,
    ReportRequest,
    UsageReport,
    UsageService,
    UsageSlice,
    position,
)
from gateway.platform.database.engine import Database
from gateway.platform.database.tables import FIRST_TOKENS, RollupPeriod, RollupRow
from gateway.records.errors import NotFoundError, StoreUnavailableError
from gateway.records.times import day_of, hour_of, to_time
from gateway.records.usage_record import BOUNDS_MS, Outcome, UsageRecord, quantile_ms
from tests.gateway.billing.ledger_rows import NOON, add, record, sum_up, totals
from tests.support.kinds import DATABASE_KINDS, every_database

ACME = UsageFilter(tenant_id="acme")
WHOLE = Span(NOON - 3 * DAY, NOON + 3 * DAY)

FIELD: dict[Dimension, Callable[[UsageRecord], str]] = {
    Dimension.TENANT: lambda each: each.tenant_id,
    Dimension.PROJECT: lambda each: each.project_id or "",
    Dimension.KEY: lambda each: each.credential_id,
    Dimension.MODEL: lambda each: each.model,
    Dimension.SERVICE_TIER: lambda each: each.service_tier,
}
LABEL = {
    Bucket.HOUR: "%Y-%m-%dT%H",
    Bucket.DAY: "%Y-%m-%d",
    Bucket.MONTH: "%Y-%m",
    Bucket.TOTAL: "",
}


def some_records(generator: random.Random, number: int) -> list[UsageRecord]:
    """Return records over a week around the turn of a month, in few hours."""
    start = datetime(2026, 10, 29, 22, tzinfo=NOON.tzinfo)
    return [
        record(
            start + timedelta(minutes=generator.randrange(5 * 24 * 60), milliseconds=999),
            request_id=f"cmpl-{generator.getrandbits(64)}{generator.choice(['', '', '.late'])}",
            tenant_id=generator.choice(["acme", "other"]),
            project_id=generator.choice([None, "prj_1", "prj_2"]),
            credential_id=generator.choice(["key_1", "key_2", "jwt:ann"]),
            model=generator.choice(["m1", "org/m2"]),
            service_tier=generator.choice(list(ServiceTier)),
            outcome=generator.choice(list(Outcome)),
            is_streamed=generator.random() < 0.5,
            prompt_tokens=generator.choice([0, 1, 100, 10**12]),
            cached_tokens=0,
        )
        for _ in range(number)
    ]


def expected(
    records: Iterable[UsageRecord], asked: ReportRequest
) -> dict[tuple[str, ...], UsageSums]:
    """Return the sums of a report by label and values, from the records alone."""
    groups: defaultdict[tuple[str, ...], list[UsageRecord]] = defaultdict(list)
    for each in records:
        at, wanted = to_time(each.created_ms), asked.wanted
        if (
            asked.span.start <= at < asked.span.end
            and wanted.tenant_id in (None, each.tenant_id)
            and wanted.project_id in (None, each.project_id)
            and wanted.credential_id in (None, each.credential_id)
            and wanted.model in (None, each.model)
        ):
            values = (FIELD[dimension](each) for dimension in asked.dimensions)
            groups[at.strftime(LABEL[asked.bucket]), *values].append(each)
    return {key: totals(members) for key, members in groups.items()}


def by_key(asked: ReportRequest, slices: Iterable[UsageSlice]) -> dict[tuple[str, ...], UsageSums]:
    """Return a report's sums in the same way."""
    found = {
        (
            "" if asked.bucket is Bucket.TOTAL else each.span.start.strftime(LABEL[asked.bucket]),
            *(each.values[dimension] for dimension in asked.dimensions),
        ): each.sums
        for each in slices
    }
    assert len(found) == len(list(slices))
    return found


async def whole_report(
    service: UsageService, asked: ReportRequest, *, page: int = 1000
) -> list[UsageSlice]:
    """Read all pages of a report."""
    slices: list[UsageSlice] = []
    after: tuple[str, ...] | None = None
    while True:
        report = await service.report(asked, after=after, limit=page)
        assert len(report.slices) <= page
        slices += report.slices
        if report.next is None:
            return slices
        assert len(report.slices) == page
        after = report.next


@pytest.mark.parametrize(
    ("database_kind", "number"),
    [
        pytest.param(kind, number, marks=() if number == chosen else pytest.mark.long)
        for kind, chosen in zip(DATABASE_KINDS, (1, 2), strict=True)
        for number in range(4)
    ],
    indirect=["database_kind"],
)
async def test_reports_equal_sums_over_rows(database: Database, number: int) -> None:
    generator = random.Random(number)
    records = some_records(generator, 90)
    early, late = records[:60], records[60:]
    await add(database, early)
    hours = sorted({hour_of(to_time(each.created_ms)) for each in early})
    await sum_up(database, early, generator.sample(hours, len(hours) * (number + 1) // 4))
    # These are added after some of their hours were summed up, and mark them again.
    await add(database, late)
    service = UsageService(database)
    first, last = (to_time(each(r.created_ms for r in records)) for each in (min, max))
    for bucket, size in product(Bucket, (0, 2, 5)):
        start = first + timedelta(minutes=generator.randrange(-60, 3000))
        end = generator.choice([last + DAY, start + timedelta(hours=generator.randrange(1, 90))])
        asked = ReportRequest(
            wanted=UsageFilter(
                tenant_id=generator.choice([None, "acme"]),
                project_id=generator.choice([None, None, "prj_1"]),
                credential_id=generator.choice([None, None, "key_2", "jwt:ann"]),
                model=generator.choice([None, None, "org/m2"]),
            ),
            span=generator.choice([Span(start, end), Span(hour_of(start), hour_of(end))]),
            bucket=bucket,
            dimensions=tuple(sorted(generator.sample(list(Dimension), size))),
        )
        found = await whole_report(service, asked, page=generator.choice([25, 1000]))
        assert by_key(asked, found) == expected(records, asked), asked
        tiers = replace(asked, dimensions=(Dimension.SERVICE_TIER,))
        sums = expected(records, tiers)
        costs = Counter[str]()
        for (_, tier), each in sums.items():
            costs[tier] += each.cost_micros
        largest = sorted(costs, key=lambda tier: (-costs[tier], tier))[:2]
        shown = defaultdict[tuple[str, str], list[UsageSums]](list)
        for (label, tier), each in sums.items():
            shown[label, tier if tier in largest else ""].append(each)
        slices = await service.largest(tiers, count=2)
        others = {Dimension.SERVICE_TIER: ""}
        slices = [replace(each, values=others | dict(each.values)) for each in slices]
        assert by_key(tiers, slices) == {key: sum_of(parts) for key, parts in shown.items()}, tiers


async def test_days_that_are_summed_up_are_not_read_again(database: Database) -> None:
    records = [record(NOON), record(NOON + HOUR)]
    await add(database, records)
    await sum_up(database, records, [hour_of(NOON), hour_of(NOON + HOUR)])
    async with database.writing() as transaction:
        await transaction.execute(
            update(RollupRow)
            .where(RollupRow.period == RollupPeriod.DAY)
            .values(requests=RollupRow.requests + 1000)
        )
    asked = ReportRequest(
        wanted=ACME, span=Span(day_of(NOON), day_of(NOON) + DAY), bucket=Bucket.DAY
    )
    report = await UsageService(database).report(asked, after=None, limit=10)
    assert [each.sums.requests for each in report.slices] == [1002]


@every_database
async def test_pages_of_a_report_are_contiguous(database: Database) -> None:
    await add(
        database,
        [
            record(NOON + day * DAY, model=model, project_id=project)
            for day, model, project in product(range(3), ("a", "b"), (None, "p"))
        ],
    )
    asked = ReportRequest(
        wanted=ACME,
        span=WHOLE,
        bucket=Bucket.DAY,
        dimensions=(Dimension.PROJECT, Dimension.MODEL),
    )
    service = UsageService(database)
    slices = await whole_report(service, asked, page=5)
    assert slices == await whole_report(service, asked, page=1)
    shown = [(each.span.start.day, *each.values.values()) for each in slices]
    assert shown == list(product((10, 11, 12), ("", "p"), ("a", "b")))


async def test_empty_report_has_no_lines(database: Database) -> None:
    await add(database, [record(NOON, tenant_id="other")])
    for bucket in Bucket:
        asked = ReportRequest(wanted=ACME, span=WHOLE, bucket=bucket)
        found = await UsageService(database).report(asked, after=None, limit=10)
        assert found == UsageReport([], None)


@every_database
async def test_report_sees_one_state_while_rows_are_added(database: Database) -> None:
    service = UsageService(database)
    asked = ReportRequest(wanted=ACME, span=WHOLE, bucket=Bucket.TOTAL)
    done = asyncio.Event()
    records: list[UsageRecord] = []

    async def write() -> None:
        for number in range(8):
            two = [record(NOON + number * HOUR), record(NOON - number * HOUR)]
            records.extend(two)
            await add(database, two)
            if number % 2:
                await sum_up(database, records, [hour_of(NOON), hour_of(NOON + number * HOUR)])
        done.set()

    async def read() -> None:
        seen = 0
        while not done.is_set():
            report = await service.report(asked, after=None, limit=1)
            requests = sum(each.sums.requests for each in report.slices)
            # Pairs are added together, and none is missed or counted twice.
            assert requests % 2 == 0
            assert requests >= seen
            seen = requests

    await asyncio.gather(write(), read())
    report = await service.report(asked, after=None, limit=1)
    assert report.slices[0].sums == totals(records)


@every_database
async def test_report_does_not_mix_two_states(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = [record(NOON), record(NOON + HOUR)]
    await add(database, records)
    await sum_up(database, records, [NOON, NOON + HOUR])
    look = usage_service.dirty_hours

    async def look_and_wait(transaction: AsyncSession, span: Span) -> set[datetime]:
        hours = await look(transaction, span)
        # Meanwhile two rows come in, and the sums of one of their hours are made.
        records.extend([record(NOON), record(NOON + HOUR)])
        await add(database, records[2:])
        await sum_up(database, records, [NOON + HOUR])
        return hours

    monkeypatch.setattr(usage_service, "dirty_hours", look_and_wait)
    asked = ReportRequest(wanted=ACME, span=WHOLE, bucket=Bucket.HOUR)
    report = await UsageService(database).report(asked, after=None, limit=10)
    assert [each.sums.requests for each in report.slices] == [1, 1]


@every_database
async def test_requests_are_listed_newest_first_page_by_page(database: Database) -> None:
    same_time = [record(NOON) for _ in range(5)]
    others = [record(NOON + number * HOUR) for number in (-40, -1, 2, 50)]
    await add(database, [*same_time, *others, record(NOON, tenant_id="other")])
    service = UsageService(database)
    seen: list[UsageRecord] = []
    before = None
    while True:
        page = await service.requests(ACME, WHOLE, before=before, limit=2)
        seen += page.entries
        if not page.has_more:
            break
        before = position(page.entries[-1])
    assert seen == sorted([*same_time, *others], key=position, reverse=True)
    one = await service.requests(ACME, Span(NOON, NOON + HOUR), before=None, limit=5)
    assert (len(one.entries), one.has_more) == (5, False)


@pytest.mark.parametrize(
    ("wanted", "number"),
    [
        ({"model": "m2"}, 1),
        ({"credential_id": "key_2"}, 2),
        ({"project_id": "prj_1", "credential_id": "key_2"}, 1),
        ({"project_id": "prj_1", "model": "m2"}, 0),
    ],
)
async def test_requests_are_filtered(
    database: Database, wanted: dict[str, Any], number: int
) -> None:
    made: list[dict[str, Any]] = [
        {"model": "m2"},
        {"credential_id": "key_2"},
        {"credential_id": "key_2", "project_id": "prj_1"},
        {"tenant_id": "other", "model": "m2", "credential_id": "key_2", "project_id": "prj_1"},
    ]
    await add(database, [record(**fields) for fields in made])
    asked = UsageFilter(tenant_id="acme", **wanted)
    page = await UsageService(database).requests(asked, WHOLE, before=None, limit=10)
    assert len(page.entries) == number


async def test_one_request_is_found_by_its_tenant_only(database: Database) -> None:
    mine = record(outcome=Outcome.TIMED_OUT, code="generation_timeout", is_prepaid=True, jobs=3)
    await add(database, [mine, record(tenant_id="other")])
    service = UsageService(database)
    assert await service.request(ACME, mine.request_id) == mine
    assert await service.request(UsageFilter(tenant_id=None), mine.request_id) == mine
    for tenant, key in (("other", None), ("acme", "key_2")):
        with pytest.raises(NotFoundError):
            await service.request(UsageFilter(tenant_id=tenant, credential_id=key), mine.request_id)


@every_database
async def test_pages_have_every_request_once_while_others_are_added(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.billing.usage.service.PART", 3)
    records = [record(NOON + number % 5 * HOUR) for number in range(30)]
    await add(database, records)
    seen: list[UsageRecord] = []
    has_more = True
    while has_more:
        before = position(seen[-1]) if seen else None
        page = await UsageService(database).requests(ACME, WHOLE, before=before, limit=7)
        await add(database, [record(NOON + 5 * HOUR)])  # Newer than all pages.
        seen += page.entries
        has_more = page.has_more
    assert seen == sorted(records, key=position, reverse=True)


async def test_database_outage_is_one_error(tmp_path: Path) -> None:
    database = Database(f"postgresql+asyncpg://postgres@/none?host={tmp_path}")
    service = UsageService(database)
    asked = ReportRequest(wanted=ACME, span=WHOLE, bucket=Bucket.DAY)
    with pytest.raises(StoreUnavailableError):
        await service.report(asked, after=None, limit=10)
    with pytest.raises(StoreUnavailableError):
        await service.requests(ACME, WHOLE, before=None, limit=10)
    with pytest.raises(StoreUnavailableError):
        await service.request(ACME, "cmpl-1")
    await database.aclose()


@every_database
async def test_latency_is_that_of_all_requests_with_a_token(database: Database) -> None:
    random_ = random.Random(9)
    times = [random_.randint(0, 3) and int(random_.lognormvariate(6, 1.5)) for _ in range(1500)]
    records = [
        record(NOON + timedelta(minutes=450 * random_.randint(-20, 20)), first_token_ms=time)
        for time in times
    ]
    batch = record(first_token_ms=10**8, service_tier=ServiceTier.BATCH)
    slow = record(tenant_id="other", first_token_ms=10**8)
    reports, whole = UsageService(database), Span(NOON - 7 * DAY, NOON + 7 * DAY)
    await add(database, [*records[:1000], batch, slow])
    await Rollups(database).make_all()
    # These are read from the ledger.
    await add(database, records[1000:])
    found = await reports.latency(UsageFilter(tenant_id="acme"), whole)
    measured = sorted(time for time in times if time)
    assert found.requests == len(measured)
    for percent, shown in ((50, found.p50_ms), (99, found.p99_ms)):
        assert shown == pytest.approx(measured[len(measured) * percent // 100], rel=0.2)
    longest = await reports.latency(UsageFilter(tenant_id="other"), whole)
    assert longest == LatencyBody(requests=1, p50_ms=BOUNDS_MS[-1], p99_ms=BOUNDS_MS[-1])
    nothing = await reports.latency(UsageFilter(tenant_id="nobody"), whole)
    assert nothing == LatencyBody(requests=0, p50_ms=None, p99_ms=None)


@pytest.mark.parametrize(
    ("times", "percent", "shown"),
    [
        ([8], 50, 4),
        ([9, 11], 50, 10),  # Half of the bucket from 8 to 11.
        ([1000] * 99 + [5000], 99, 1024),
        ([1000] * 98 + [5000] * 2, 99, 4944),
        ([10**7], 1, BOUNDS_MS[-1]),
    ],
)
def test_quantile_is_interpolated_in_its_bucket(times: list[int], percent: int, shown: int) -> None:
    counts = [0] * len(FIRST_TOKENS)
    for time in times:
        counts[bisect_left(BOUNDS_MS, time)] += 1
    assert quantile_ms(counts, percent) == shown


@every_database
async def test_statement_equals_the_rows_of_its_month(database: Database) -> None:
    tenants = TenantService(database, announcer=None)  # type: ignore[arg-type] # Announces nothing.
    await tenants.create("Acme", tenant_id="acme")
    random_ = random.Random(7)
    records = [
        record(
            # Few hours, of which each is summed up in a transaction of its own.
            NOON + timedelta(days=5 * random_.randint(-8, 8), minutes=random_.randint(0, 180)),
            model=random_.choice(["m1", "m2"]),
            service_tier=random_.choice([ServiceTier.DEFAULT, ServiceTier.FLEX]),
            cost_micros=random_.randint(0, 10**12),
            tenant_id=random_.choice(["acme", "other"]),
        )
        for _ in range(300)
    ]
    await add(database, records[:200])
    await Rollups(database).make_all()
    await add(database, records[200:])
    statement = await InvoiceService(database).statement("acme", "2026-11")
    own = [
        each
        for each in records
        if each.tenant_id == "acme" and to_time(each.created_ms).strftime("%Y-%m") == "2026-11"
    ]
    assert len(own) > 30
    assert statement.total_micros == sum(each.cost_micros for each in own)
    expected = defaultdict[tuple[str, str], int](int)
    for each in own:
        expected[each.model, each.service_tier] += each.cost_micros
    lines = {(line.model, line.service_tier): line.cost_micros for line in statement.lines}
    assert lines == expected
