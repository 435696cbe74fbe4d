"""Export of the ledger: at the end, the receiver's distinct events equal the ledger's rows."""

import asyncio
import json
from collections.abc import AsyncIterator
from datetime import datetime, timedelta
from random import Random
from typing import Any

import pytest
from click.testing import CliRunner
from pydantic import ValidationError
from redis.asyncio import Redis
from sqlalchemy import func, select, update
from starlette.responses import JSONResponse

from gateway.accounts.tenants.service import TenantService
from gateway.billing.exports import store as store_module
from gateway.billing.exports.routes import ExportService
from gateway.billing.exports.store import ExportBody, ExportStore
from gateway.billing.ledger.drain import row_of
from gateway.billing.ledger.store import LedgerStore
from gateway.cli.main import main
from gateway.jobs import exports as exports_module
from gateway.jobs.exports import Exporter
from gateway.platform.changes import ChangeAnnouncer
from gateway.platform.database.engine import Database
from gateway.platform.database.tables import (
    ExportBatchRow,
    ExportBatchState,
    ExportSinkRow,
    LedgerRow,
    PositionRow,
)
from gateway.platform.settings import ExportSink, load_settings
from gateway.records.errors import NotFoundError
from gateway.records.times import EPOCH, to_time, utc_now
from gateway.records.usage_record import Outcome, UsageRecord
from tests.gateway.http_calls import serving
from tests.support.billing import Billing, Fate, running_billing
from tests.support.cases import all_cases
from tests.support.kinds import every_database
from tests.support.patience import PATIENCE_SECONDS
from tests.support.usage import HOUR_MS, NOON_MS, usage_record

SINK = "billing"
UNKNOWN: list[Fate] = [
    (True, 500, ""),
    (True, 0, ""),
    (True, -1, ""),
    (False, 0, ""),
    (False, 503, ""),
]
"""Fates after which the sender cannot know whether the events are stored."""


@pytest.fixture
async def billing() -> AsyncIterator[Billing]:
    async with running_billing() as billing:
        yield billing


@pytest.fixture(autouse=True)
def _short_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exports_module, "TIMEOUT_SECONDS", 0.3)


def _exporter(
    database: Database,
    billing: Billing,
    kind: str,
    *,
    allows_private: bool = True,
    **options: Any,
) -> Exporter:
    sink = {"name": SINK, "kind": kind, "url": billing.url, **options}
    settings = load_settings(
        export_sinks=[sink],  # type: ignore[arg-type]
        export_tokens=f"{SINK}=token",
        webhook_allow_private=str(allows_private),
    )
    return Exporter(settings, database)


async def _run(exporter: Exporter) -> None:
    """Run the scheduled job."""
    await exporter.run(seconds=5.0)


async def _insert(database: Database, *records: UsageRecord) -> None:
    async with database.writing() as transaction:
        await LedgerStore(transaction).insert([row_of(record) for record in records])


async def _ledger_cost(database: Database) -> int:
    async with database.reading() as transaction:
        return int(await transaction.scalar(select(func.sum(LedgerRow.cost_micros))) or 0)


async def _state(database: Database) -> ExportBody:
    async with database.reading() as transaction:
        [state] = await ExportStore(transaction).states()
    return state


async def _make_due(database: Database) -> None:
    """Let the time pass that a failure, a lease or a window lasts."""
    async with database.writing() as transaction:
        await transaction.execute(
            update(ExportSinkRow).values(next_attempt_at=EPOCH, leased_until=EPOCH, closed_at=EPOCH)
        )


async def _finish(database: Database, *exporters: Exporter) -> None:
    """Export until nothing is pending."""
    for _ in range(60):
        await _make_due(database)
        await asyncio.gather(*map(_run, exporters))
        if not (await _state(database)).lag_rows:
            return
    pytest.fail(f"the export does not end: {await _state(database)}")


async def _die_before_the_acknowledgement(
    patch: pytest.MonkeyPatch, database: Database, exporter: Exporter
) -> None:
    """Let a process die after the response and before its transaction."""
    deaths = []

    async def die(*_arguments: object) -> None:
        deaths.append(1)
        raise asyncio.CancelledError

    with patch.context() as context:
        context.setattr(ExportStore, "delivered", die)
        while not deaths:
            await _make_due(database)
            await _run(exporter)


async def _tenants(database: Database, redis: Redis, **customers: str | None) -> TenantService:
    service = TenantService(database, ChangeAnnouncer(redis))
    for tenant_id, customer in customers.items():
        await service.create(tenant_id, tenant_id=tenant_id, stripe_customer_id=customer)
    return service


@every_database
async def test_events_equal_the_ledger_after_failures_and_deaths(
    database: Database, billing: Billing, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = Random(7)
    one, other = (_exporter(database, billing, "openmeter", batch_size=7) for _ in range(2))
    await _insert(database, usage_record(0))
    await _run(one)
    assert not billing.events, "a new sink begins with what enters the ledger from now on"
    before = await _ledger_cost(database)

    async def insert_some(first: int) -> None:
        for number in range(first, first + 4):
            await _insert(database, *(usage_record(10 * number + n) for n in range(3)))

    # Transactions commit out of the order in which they began, while two processes export.
    billing.fates.extend(random.sample(UNKNOWN, len(UNKNOWN)))
    inserts = [insert_some(first) for first in range(1, 17, 4)]
    await asyncio.gather(*inserts, _finish(database, one, other))
    await _insert(database, usage_record(900), usage_record(901, outcome=Outcome.LOST))
    await _die_before_the_acknowledgement(monkeypatch, database, one)
    # A gateway settles a request again that was settled as lost: the difference is one more event.
    await _insert(database, usage_record(901, cost_micros=5000))
    await _finish(database, other)

    assert billing.cost() == await _ledger_cost(database) - before
    assert billing.received["cmpl-000900"] > 1
    assert billing.most_in_flight == 1
    async with database.reading() as transaction:
        assert await transaction.scalar(select(func.count()).select_from(PositionRow)) == 0
        assert set(billing.events) == {
            id_
            for id_ in await transaction.scalars(select(LedgerRow.request_id))
            if id_ != "cmpl-000000"
        }
    first, headers = billing.requests[0]
    assert first == "POST /api/v1/events HTTP/1.1"
    assert headers["content-type"] == "application/cloudevents-batch+json"
    assert headers["authorization"] == "Bearer token"
    event = billing.events["cmpl-000901.late"]
    assert (event["specversion"], event["source"], event["type"], event["subject"]) == (
        "1.0",
        "sluice",
        "sluice.usage",
        "acme",
    )
    assert event["time"] == "2026-11-20T12:00:00.901Z"
    assert event["data"]["cost_micros"] == 5000 - 1001
    requests = [billing.events[f"cmpl-000901{late}"]["data"]["requests"] for late in ("", ".late")]
    assert requests == [1, 0]


@every_database
async def test_log_records_of_a_tenant_equal_its_rows_of_the_ledger(
    database: Database, billing: Billing, monkeypatch: pytest.MonkeyPatch
) -> None:
    exporter = _exporter(database, billing, "otlp", tenant="acme", batch_size=5)
    await _run(exporter)
    billing.poison = {"cmpl-000012"}
    rows = [usage_record(n, tenant_id=("acme", "other")[n % 2]) for n in range(20)]
    billing.fates.extend(UNKNOWN)
    await _insert(database, *rows, usage_record(100, tenant_id="other"))
    await _die_before_the_acknowledgement(monkeypatch, database, exporter)
    await _finish(database, exporter)
    own = [each for each in rows if each.tenant_id == "acme"]
    assert set(billing.events) == {each.request_id for each in own} - billing.poison
    assert max(billing.received.values()) > 1
    [rejected] = await ExportService(database).batches(SINK, ExportBatchState.REJECTED)
    assert rejected.identifier == "cmpl-000012"
    assert billing.cost() == sum(each.cost_micros for each in own) - rows[12].cost_micros
    first, headers = billing.requests[0]
    assert first == "POST /v1/logs HTTP/1.1"
    assert headers["content-type"] == "application/json"
    assert headers["authorization"] == "Bearer token"
    event = billing.events["cmpl-000004"]
    assert event["timeUnixNano"] == str(1_000_000 * rows[4].created_ms)
    assert (event["eventName"], event["sluice.tenant"]) == ("sluice.usage", "acme")
    assert event["sluice.prompt_tokens"] == str(rows[4].prompt_tokens)
    async with database.reading() as transaction:
        # The rejected one is left.
        assert await transaction.scalar(select(func.count()).select_from(PositionRow)) == 1


async def test_receiver_of_a_tenant_must_be_on_the_public_internet(
    database: Database, billing: Billing
) -> None:
    exporter = _exporter(database, billing, "otlp", tenant="acme", allows_private=False)
    await _run(exporter)
    await _insert(database, usage_record(1))
    await _run(exporter)
    assert not billing.requests
    assert (await _state(database)).last_error == "is not an https URL"


async def test_records_that_a_receiver_drops_are_counted_and_not_sent_again(
    database: Database, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(exports_module, "TIMEOUT_SECONDS", PATIENCE_SECONDS)
    bodies = list[bytes]()

    async def receiver(scope: Any, receive: Any, send: Any) -> None:
        bodies.append((await receive())["body"])
        partial = {"rejectedLogRecords": "2", "errorMessage": "too old\x1b"}
        await JSONResponse({"partialSuccess": partial})(scope, receive, send)

    async with serving(receiver) as url:
        exporter = _exporter(database, Billing(), "otlp", tenant="acme", url=url)
        await _run(exporter)
        await _insert(database, *(usage_record(number) for number in range(3)))
        await _finish(database, exporter)
    assert len(bodies) == 1
    assert "the sink billing has dropped 2 records: too old\\x1b" in caplog.text


@all_cases(
    ("kind", "tenant", "message"),
    [("otlp", "", "needs a 'tenant'"), ("stripe", "acme", "takes no 'tenant'")],
)
def test_sink_names_the_tenant_that_its_kind_needs(kind: str, tenant: str, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ExportSink.model_validate(
            {"name": "x", "kind": kind, "url": "https://x.example", "tenant": tenant}
        )


async def test_a_rejected_event_is_put_aside_alone_and_can_be_retried(
    database: Database, billing: Billing
) -> None:
    exporter = _exporter(database, billing, "cloudevents", batch_size=50)
    service = ExportService(database)
    await _run(exporter)
    billing.poison = {"cmpl-000013"}
    await _insert(database, *(usage_record(number) for number in range(20)))
    await _finish(database, exporter)
    assert len(billing.events) == 19
    [rejected] = await service.batches(SINK, ExportBatchState.REJECTED)
    assert (rejected.identifier, rejected.tenant_id) == ("cmpl-000013", "acme")
    assert "no such event cmpl-000013" in rejected.last_error
    billing.poison = set()
    with pytest.raises(NotFoundError):
        await service.retry(SINK, rejected.id + 1)
    assert await service.retry(SINK, rejected.id) == 1
    await _finish(database, exporter)
    assert billing.cost() == await _ledger_cost(database)
    assert (await _state(database)).batches[ExportBatchState.REJECTED] == 0


async def test_receiver_decides_when_it_gets_the_next_request(
    database: Database, billing: Billing
) -> None:
    exporter = _exporter(database, billing, "cloudevents")
    await _run(exporter)
    await _insert(database, usage_record(1))
    billing.fates.extend([(False, 429, "retry-after: 600\r\n"), (False, 401, "")])
    begin = utc_now()
    await _run(exporter)
    await _run(exporter)
    assert len(billing.requests) == 1, "not before retry-after is over"
    state = await _state(database)
    assert state.next_attempt_at is not None
    assert state.next_attempt_at - begin >= timedelta(seconds=600)
    assert state.last_error == "responded with status 429"
    # A wrong token concerns no single event.
    await _make_due(database)
    await _run(exporter)
    state = await _state(database)
    assert state.batches[ExportBatchState.PENDING] == 1
    assert state.failures == 2
    service = ExportService(database)
    await service.pause(SINK)
    await _make_due(database)
    await _run(exporter)
    assert not billing.events
    await service.resume(SINK)
    await _run(exporter)
    assert billing.cost() == await _ledger_cost(database)


async def test_failures_of_sums_that_are_sent_at_once_count_once(
    database: Database, redis: Redis, billing: Billing, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"t{number}" for number in range(exports_module.AT_ONCE)]
    await _tenants(database, redis, **{name: f"cus_{name}" for name in names})
    exporter = _exporter(database, billing, "stripe")
    await _run(exporter)
    await _insert(database, *(usage_record(at, tenant_id=id_) for at, id_ in enumerate(names)))

    async def attempt(first: Fate) -> tuple[int, int]:
        """Return the failures, and the seconds until the next attempt."""
        down, busy = (False, 503, ""), (False, 429, "retry-after: 7\r\n")
        pending = len(names) - len(billing.events)
        billing.fates.extend([first, *[down] * (pending - 2), busy])
        await _make_due(database)
        begin = utc_now()
        await _run(exporter)
        state = await _state(database)
        assert state.next_attempt_at is not None
        return state.failures, round((state.next_attempt_at - begin).total_seconds())

    assert await attempt((False, 500, "")) == (1, 7)
    assert await attempt((False, 500, "")) == (2, 10)
    delivered = Exporter._delivered
    for seconds in (0.0, 0.2):

        async def deliver(*arguments: Any, seconds: float = seconds) -> Any:
            await asyncio.sleep(seconds)  # In the end, failures are stored first.
            return await delivered(*arguments)

        monkeypatch.setattr(Exporter, "_delivered", deliver)
        assert await attempt((True, 204, "")) == (1, 7), "the sink is up"
    assert len(billing.events) == 2


@every_database
async def test_sums_for_stripe_equal_the_ledger_after_failures_and_deaths(
    database: Database,
    redis: Redis,
    billing: Billing,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(store_module, "ROWS_OF_WINDOW", 25)
    await _tenants(database, redis, acme="cus_1", other="cus_2", unpaid=None)
    exporter = _exporter(database, billing, "stripe", event="cost")
    await _run(exporter)

    def record(number: int, **more: Any) -> UsageRecord:
        tenant = ("acme", "other", "unpaid")[number % 3]
        created_ms = NOON_MS + number * HOUR_MS // 20
        return usage_record(number, tenant_id=tenant, created_ms=created_ms, **more)

    await _insert(database, *(record(number) for number in range(60)))
    prepaid = usage_record(500, is_prepaid=True)
    await _insert(database, prepaid, usage_record(501, cost_micros=0))
    await _run(exporter)
    assert not billing.requests, "the window is open"
    await _die_before_the_acknowledgement(monkeypatch, database, exporter)
    billing.fates.extend(UNKNOWN)
    await _finish(database, exporter)
    await _insert(database, *(record(number) for number in range(60, 70)))
    await _finish(database, exporter)

    state = await _state(database)
    assert state.batches == {**dict.fromkeys(ExportBatchState, 0), ExportBatchState.HELD: 1}
    expected = await _ledger_cost(database) - prepaid.cost_micros
    assert billing.cost() + state.held_micros == expected
    assert max(billing.received.values()) > 1
    by_customer: dict[str, int] = {}
    for event in billing.events.values():
        customer = event["payload[stripe_customer_id]"]
        by_customer[customer] = by_customer.get(customer, 0) + int(event["cost"])
        # The event belongs to the hour of its requests, so to the right month of the invoice.
        hour = event["id"].split(":")[1]
        moment = EPOCH + timedelta(seconds=int(event["timestamp"]))
        assert f"{moment:%Y%m%d%H}" == hour
        assert len(event["id"]) <= 100
    rows = [record(number) for number in range(70)]
    assert by_customer["cus_1"] == sum(r.cost_micros for r in rows if r.tenant_id == "acme")
    first, headers = billing.requests[0]
    assert first == "POST /v1/billing/meter_events HTTP/1.1"
    assert headers["content-type"] == "application/x-www-form-urlencoded"

    await TenantService(database, ChangeAnnouncer(redis)).update(
        "unpaid", stripe_customer_id="cus_3"
    )
    await _finish(database, exporter)
    assert billing.cost() == expected
    assert (await _state(database)).held_micros == 0


async def test_a_sum_with_an_unknown_outcome_is_not_sent_after_stripe_drops_its_id(
    database: Database, redis: Redis, billing: Billing
) -> None:
    await _tenants(database, redis, acme="cus_1", other="cus_2")
    exporter = _exporter(database, billing, "stripe", retry_for="3600")
    await _run(exporter)
    await _insert(database, usage_record(1), usage_record(2, tenant_id="other"))
    billing.fates.extend([(False, 429, ""), (True, 500, "")])
    await _make_due(database)
    await _run(exporter)
    async with database.writing() as transaction:
        await transaction.execute(
            update(ExportBatchRow)
            .where(ExportBatchRow.uncertain_since.is_not(None))
            .values(uncertain_since=utc_now() - timedelta(seconds=3601))
        )
    await _finish_all_but_uncertain(database, exporter)
    service = ExportService(database)
    [uncertain] = await service.batches(SINK, ExportBatchState.UNCERTAIN)
    assert billing.received[uncertain.identifier] == 1, "a second event could charge twice"
    assert len(billing.events) == 2, "the batch that was certainly not stored is sent on"
    assert await service.retry(SINK) == 0, "only an operator who names it may send it again"
    await service.discard(SINK, uncertain.id)
    assert billing.cost() == await _ledger_cost(database)
    with pytest.raises(NotFoundError):
        await service.discard(SINK, uncertain.id)


async def _finish_all_but_uncertain(database: Database, exporter: Exporter) -> None:
    for _ in range(3):
        await _make_due(database)
        await _run(exporter)


async def test_silent_sink_delays_no_other(
    database: Database, billing: Billing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exports_module, "TIMEOUT_SECONDS", PATIENCE_SECONDS)
    async with running_billing() as silent:
        silent.fates.append((False, -1, ""))
        sinks = [
            {"name": name, "kind": "openmeter", "url": each.url}
            for name, each in (("silent", silent), (SINK, billing))
        ]
        settings = load_settings(export_sinks=sinks)  # type: ignore[arg-type]
        exporter = Exporter(settings, database)
        await exporter.run(seconds=PATIENCE_SECONDS)
        for number in range(3):
            await _insert(database, usage_record(number))
            await exporter.run(seconds=0.5)
        assert (len(billing.events), len(silent.requests)) == (3, 1)
        await exporter.aclose()


async def test_event_that_cannot_be_encoded_is_put_aside_alone(
    database: Database, billing: Billing, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = exports_module._rfc3339

    def fail(moment: datetime) -> str:
        return encode(moment) if moment != to_time(NOON_MS + 3) else str(1 // 0)

    monkeypatch.setattr(exports_module, "_rfc3339", fail)
    exporter = _exporter(database, billing, "openmeter")
    await _run(exporter)
    await _insert(database, *(usage_record(at, created_ms=NOON_MS + at) for at in range(8)))
    await _run(exporter)
    assert len(billing.events) == 7
    [aside] = await ExportService(database).batches(SINK, ExportBatchState.REJECTED)
    assert aside.last_error == "cannot be encoded"


@all_cases(
    ("sinks", "tokens", "expected"),
    [
        ([{"name": "A", "kind": "openmeter", "url": "http://x"}], "", "EXPORT_SINKS_0_NAME"),
        ([{"name": "a", "kind": "kafka", "url": "http://x"}], "", "EXPORT_SINKS_0_KIND"),
        ([{"name": "a", "kind": "openmeter"}], "", "needs an http or https 'url'"),
        ([{"name": "a", "kind": "cloudevents", "url": "ftp://x"}], "", "needs an http"),
        ([{"name": "a", "kind": "stripe", "window": 59}], "a=t", "EXPORT_SINKS_0_WINDOW"),
        ([{"name": "a", "kind": "stripe", "window": 3601}], "a=t", "EXPORT_SINKS_0_WINDOW"),
        ([{"name": "a", "kind": "stripe"}] * 2, "a=t", "must have different names"),
        ([{"name": "a", "kind": "stripe"}], "", "needs the key of the sink 'a'"),
        ([{"name": "a", "kind": "stripe"}], "a=t,b=secret", "that SLUICE_EXPORT_SINKS lacks"),
        ([{"name": "a", "kind": "stripe"}], "a=", "must be SINK=TOKEN"),
        ([{"name": "a", "kind": "stripe", "batch_size": 1001}], "a=t", "BATCH_SIZE"),
    ],
)
def test_wrong_sink_is_refused_without_its_secrets(
    sinks: list[dict[str, Any]], tokens: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLUICE_EXPORT_SINKS", json.dumps(sinks))
    monkeypatch.setenv("SLUICE_EXPORT_TOKENS", tokens)
    result = CliRunner().invoke(main, ["jobs"])
    assert result.exit_code == 1
    assert expected in result.output
    assert "secret" not in result.output
