"""The history of the service: what models served, failed and rejected on each day."""

import asyncio
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from contract.messages import WorkerCard, WorkerState
from contract.queue import ModelStatus
from gateway.billing.ledger import history as history_module
from gateway.billing.ledger.history import DAYS, RecordedService, Served, ServiceHistory
from gateway.billing.ledger.rollups import Rollups
from gateway.billing.status import service
from gateway.billing.status.schemas import ServiceState
from gateway.limits import refusal_log as refusals_module
from gateway.limits.refusal_log import PeriodCounts, Refusals
from gateway.models.catalogue import ServedModel
from gateway.platform.database.engine import Database
from gateway.records.errors import OverloadedError
from gateway.records.times import hour_of
from gateway.records.usage_record import Outcome, UsageRecord
from tests.gateway.billing.ledger_rows import NOON, add, record
from tests.support.kinds import every_database

HOUR, DAY = timedelta(hours=1), timedelta(days=1)


@pytest.fixture(autouse=True)
def _at_noon(monkeypatch: pytest.MonkeyPatch) -> None:
    _set_clock(monkeypatch, NOON)


def _set_clock(monkeypatch: pytest.MonkeyPatch, now: datetime) -> None:
    for module in (history_module, refusals_module):
        monkeypatch.setattr(module, "utc_now", lambda: now)


def _refusals(database: Database) -> Refusals:
    """Return what records refusals, without Redis."""
    executor: Any = None
    return Refusals(database, executor, PeriodCounts(executor))


@every_database
async def test_history_has_what_every_model_served_failed_and_rejected(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = {"outcome": Outcome.FAILED, "code": "engine_dead"}
    await add(
        database,
        [
            *(record(NOON - DAY, first_token_ms=20) for _ in range(6)),
            record(NOON - DAY, **failed, first_token_ms=0),
            record(NOON - DAY, outcome=Outcome.FAILED, code="invalid_value"),
            record(NOON - DAY, outcome=Outcome.CANCELLED),
            record(NOON, model="m2", tenant_id="other"),
            record(NOON - DAYS * DAY),
        ],
    )
    await Rollups(database).make_all()
    gateways = [_refusals(database) for _ in range(2)]
    for now, models in ((NOON - DAYS * DAY, "m1"), (NOON - DAY, ["m1", ""]), (NOON, ["m1"])):
        _set_clock(monkeypatch, now)
        for gateway in gateways:
            for model in models:
                gateway.of_request(OverloadedError("full"), tenant_id="", model=model)
        # One after another: both have rows that the other one has.
        for gateway in gateways:
            await gateway.write_faults()
    history = await ServiceHistory(database).get()
    yesterday = history.days[(NOON - DAY).date()]
    counts = {model: served[:2] for model, served in yesterday.items()}
    assert counts == {"m1": (6 + 1 + 2, 1 + 2), "": (2, 2)}
    assert (yesterday["m1"].availability, yesterday["m1"].p50_ms) == (66.66, None)
    assert history.days[NOON.date()].keys() == {"m1", "m2"}
    assert {model: history.recent(model)[:2] for model in ("m1", "m2")} == {
        "m1": (2, 2),
        "m2": (1, 0),
    }
    assert len(history.days) == 2
    assert history.is_known


@every_database
async def test_one_tenant_neither_sets_nor_shows_times_of_the_service(database: Database) -> None:
    def of_tenants(hour: int, *times: tuple[int, int]) -> list[UsageRecord]:
        return [
            record(NOON - hour * HOUR, tenant_id=f"t{tenant}", model=f"m{hour}", first_token_ms=ms)
            for tenant, (number, ms) in enumerate(times)
            for _ in range(number)
        ]

    slow = (300, 41_000)
    await add(
        database,
        [
            *of_tenants(1, slow, *[(13, 20)] * 4),
            *of_tenants(2, slow, *[(100, 20)] * 3),
            *of_tenants(3, *[(9, 20)] * 5),
            *of_tenants(4, slow, *[(1, 20)] * 3, (1, 0)),
        ],
    )
    await Rollups(database).make_all()
    assert not await Rollups(database).wrong_hours(since=NOON - DAY, until=NOON + DAY)
    served = (await ServiceHistory(database).get()).days[NOON.date()]
    shown = {model: (each.p50_ms, each.p75_ms) for model, each in served.items()}
    assert shown == {"m1": (20, 23), **dict.fromkeys(("m2", "m3", "m4"), (None, None))}


async def test_rejections_wait_until_sql_is_available(database: Database, tmp_path: Path) -> None:
    away = Database(f"postgresql+asyncpg://postgres@/none?host={tmp_path}")
    refusals = _refusals(away)
    for _ in range(3):
        refusals.of_request(ZeroDivisionError(), tenant_id="", model="m1")
    await refusals.write_faults()
    refusals.of_request(ZeroDivisionError(), tenant_id="", model="m1")
    refusals._database = database
    for _ in range(2):
        await refusals.write_faults()
    history = await ServiceHistory(database).get()
    assert history.days[NOON.date()]["m1"] == Served(4, 4)
    await away.aclose()


async def test_process_reads_the_history_once_in_some_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    away = Database(f"postgresql+asyncpg://postgres@/none?host={tmp_path}")
    source, reads = ServiceHistory(away), list[object]()
    read = source._read

    async def count() -> RecordedService:
        reads.append(None)
        return await read()

    monkeypatch.setattr(source, "_read", count)
    found = await asyncio.gather(*(source.get() for _ in range(20)))
    assert {(each.is_known, *each.days) for each in found} == {(False,)}
    assert len(reads) == 1
    source._expires_at = 0.0
    await source.get()
    assert len(reads) == 2
    await away.aclose()


def _model(name: str, *, workers: int = 1, wait_seconds: float = 0.0) -> ServedModel:
    card = WorkerCard("w1", name, WorkerState.READY, "vllm 0.32.0", 1)
    return ServedModel(card, ModelStatus(workers, 0, 0, oldest_wait_seconds=wait_seconds))


@pytest.mark.parametrize(
    ("models", "expected"),
    [
        ([_model("m1")], ["operational"] * 2),
        ([_model("m1"), _model("failing")], ["degraded", "operational", "degraded"]),
        ([_model("fair")], ["operational"] * 2),
        ([_model("m1", wait_seconds=31)], ["degraded"] * 2),
        ([_model("m1", workers=0)], ["no_worker"] * 2),
        ([_model("m1"), _model("m2", workers=0)], ["degraded", "operational", "no_worker"]),
        ([], ["no_worker"]),
    ],
)
def test_state_follows_workers_waits_and_failures(
    models: list[ServedModel], expected: list[str]
) -> None:
    recent = {"failing": Served(100, 6), "fair": Served(100, 5), "m1": Served(10, 0)}
    history = RecordedService(NOON, hours={hour_of(NOON): recent})
    status = service._status(history, models, 2, is_stale=False)
    assert [status.state, *(model.state for model in status.models)] == expected
    stale = service._status(history, models, 2, is_stale=True)
    assert {stale.state, *(each.state for each in stale.models)} == {ServiceState.UNAVAILABLE}


def test_status_has_every_day_and_the_sums_of_the_period() -> None:
    bucket = (0, 0, 0, 0, 10) + (0,) * 31
    history = RecordedService(
        NOON,
        days={
            (NOON - 2 * DAY).date(): {"m1": Served(1, 1)},
            (NOON - DAY).date(): {"m1": Served(10_000, 1, bucket), "retired": Served(20_000, 0)},
            NOON.date(): {"": Served(10_000, 7)},
        },
    )
    status = service._status(history, [_model("m1")], 2, is_stale=False)
    [model] = status.models
    # Too few failures for 0.01 % are shown, too.
    assert (model.availability, model.p50_ms, model.p75_ms) == (99.99, 28, 30)
    assert [(each.date.day, each.availability) for each in model.days] == [(9, 99.99), (10, None)]
    assert [each.p50_ms for each in model.days] == [28, None]
    assert (status.availability, status.days[0].availability) == (99.98, 99.99)
    assert service._status(history, [_model("m1")], 3, is_stale=False).availability == 99.97
