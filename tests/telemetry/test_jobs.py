"""Metrics of `sluice jobs` and `sluice beat`: usage, reservations, keys, and their own state."""

import math
import os
import signal
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from prometheus_client import REGISTRY
from redis.asyncio import Redis

from contract import keys
from gateway.accounts.keys.service import KeyService
from gateway.accounts.tenants.service import TenantService
from gateway.billing.exports.routes import ExportService
from gateway.billing.exports.store import ExportStore
from gateway.billing.ledger.drain import row_of
from gateway.billing.ledger.pending import OVERDUE_MS
from gateway.billing.ledger.store import LedgerStore
from gateway.cli.jobs import SIGNALS, serving_health
from gateway.jobs.app import BoundedScheduler, SchedulerTick, create_app, run_beat
from gateway.jobs.deployment_gauges import Observer
from gateway.jobs.schedule import sweep
from gateway.platform.changes import ChangeAnnouncer
from gateway.platform.database.engine import Database
from gateway.platform.settings import Settings, load_settings
from gateway.records.errors import StartupError
from gateway.records.times import to_ms, utc_now
from gateway.records.usage_record import encode_usage
from tests.support.processes import free_port
from tests.support.redis_server import running_redis
from tests.support.stack import http_status
from tests.support.usage import usage_record


def reported(name: str, **labels: str) -> float:
    """Return the value of a series of this process."""
    value = REGISTRY.get_sample_value(name, labels)
    assert value is not None, name
    return value


async def test_the_lag_of_the_ledger_is_the_age_of_its_oldest_missing_record(
    redis: Redis, database: Database
) -> None:
    observer = Observer(redis, database)
    await observer.update()
    assert (reported("sluice_ledger_lag_seconds"), reported("sluice_ledger_pending_records")) == (
        0,
        0,
    )
    seconds, _ = await redis.time()
    for number, age in ((1, 40), (2, 90), (3, 5)):
        record = usage_record(number, tenant_id=f"tenant-{number}")
        stream = keys.usage(keys.bucket_of(record.tenant_id))
        await redis.xadd(stream, {"u": encode_usage(record)}, id=f"{(seconds - age) * 1000}-0")
    await observer.update()
    assert 90 <= reported("sluice_ledger_lag_seconds") < 300
    assert reported("sluice_ledger_pending_records") == 3


async def test_reservations_are_overdue_a_minute_after_their_lease(
    redis: Redis, database: Database
) -> None:
    seconds, _ = await redis.time()
    now_ms = seconds * 1000
    expiries = {"live": now_ms + 30_000, "late": now_ms - 5_000, "lost": now_ms - OVERDUE_MS - 1}
    for bucket, (request_id, expiry) in enumerate(expiries.items()):
        await redis.zadd(keys.open_requests(bucket), {request_id: expiry})
    await Observer(redis, database).update()
    assert reported("sluice_quota_open_reservations") == 3
    assert reported("sluice_quota_overdue_reservations") == 1


async def test_keys_that_expire_soon_are_counted_until_they_expire(
    redis: Redis, database: Database
) -> None:
    announcer = ChangeAnnouncer(redis)
    await TenantService(database, announcer).create("Acme", tenant_id="acme")
    service = KeyService(database, announcer)
    for days in (0.5, 0.6, 3.0, 30.0, None):
        expires_at = None if days is None else utc_now() + timedelta(days=days)
        await service.create("acme", name="test", expires_at=expires_at)
    revoked = await service.create("acme", name="x", expires_at=utc_now() + timedelta(hours=1))
    await service.revoke("acme", revoked.record.id)
    await Observer(redis, database).update()
    assert reported("sluice_keys_expiring", within="1d") == 2
    assert reported("sluice_keys_expiring", within="7d") == 3


async def test_lag_of_an_export_is_that_of_its_oldest_request(
    redis: Redis, database: Database
) -> None:
    now_ms = to_ms(utc_now())
    async with database.writing() as transaction:
        store = ExportStore(transaction)
        await store.register("x", "openmeter", utc_now())
        ended_ms = [now_ms - age * 1000 for age in (90, 40, 60)]
        await LedgerStore(transaction).insert(
            [row_of(usage_record(n, ended_ms=ms)) for n, ms in enumerate(ended_ms)]
        )
        sink = await store.register("x", "openmeter", utc_now())
        await store.freeze_requests(sink, 2)
    observer = Observer(redis, database)
    await observer.update()
    assert reported("sluice_export_lag_rows", sink="x") == 3
    assert 90 <= reported("sluice_export_lag_seconds", sink="x") < 300
    assert reported("sluice_export_batches", sink="x", state="pending") == 1
    assert reported("sluice_export_held_micros", sink="x") == 0
    await ExportService(database).remove("x")
    await observer.update()
    assert REGISTRY.get_sample_value("sluice_export_lag_rows", {"sink": "x"}) is None


async def test_unreadable_values_are_not_reported_as_before(database: Database) -> None:
    with running_redis() as server:
        async with Redis.from_url(server.url) as redis:
            observer = Observer(redis, database)
            await observer.update()
            assert reported("sluice_quota_open_reservations") == 0
            address = {"server": f"127.0.0.1:{server.port}"}
            assert reported("sluice_redis_used_memory_bytes", **address) > 0
            server.stop()
            await observer.update()
            for name in (
                "sluice_ledger_lag_seconds",
                "sluice_ledger_pending_records",
                "sluice_quota_open_reservations",
                "sluice_quota_overdue_reservations",
            ):
                assert math.isnan(reported(name)), name
            for name in ("sluice_redis_used_memory_bytes", "sluice_redis_max_memory_bytes"):
                assert math.isnan(reported(name, **address)), name
            server.start()
            await observer.update()
            assert reported("sluice_quota_open_reservations") == 0


async def test_requests_ended_by_the_sweep_are_counted() -> None:
    async def end_three() -> None:
        services.sweep.lost_micros += 5
        services.sweep.settled_requests += 3

    found = SimpleNamespace(run=end_three, lost_micros=7, settled_requests=2)
    services: Any = SimpleNamespace(sweep=found)
    before = reported("sluice_quota_swept_reservations_total")
    lost = reported("sluice_ledger_lost_micros_total")
    await sweep(services)
    assert reported("sluice_ledger_lost_micros_total") - lost == 5
    assert reported("sluice_quota_swept_reservations_total") - before == 3


@pytest.mark.parametrize("number", SIGNALS)
def test_signal_before_celery_has_started_exits_cleanly(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It responds once it runs, so no probe takes it for a starting process.
    settings = load_settings(metrics_port=str(free_port()))
    exits: list[int] = []
    monkeypatch.setattr(os, "_exit", exits.append)
    before = signal.getsignal(number)
    with serving_health(settings, lambda: True):
        signal.raise_signal(number)
    assert exits == [0]
    assert signal.getsignal(number) == before
    assert http_status(f"http://127.0.0.1:{settings.metrics_port}/healthz") == 0


def test_no_port_opens_no_server_and_a_taken_one_is_reported() -> None:
    with serving_health(Settings(), lambda: True):
        pass
    settings = load_settings(metrics_port=str(free_port()))
    url = f"http://127.0.0.1:{settings.metrics_port}"
    with serving_health(settings, lambda: False):
        assert http_status(f"{url}/healthz") == 503
        assert http_status(f"{url}/readyz") == 404
        assert http_status(f"{url}/metrics") == 200
        with (
            pytest.raises(StartupError, match=f"SLUICE_METRICS_PORT.*{settings.metrics_port}"),
            serving_health(settings, lambda: True),
        ):
            pass
    assert http_status(f"{url}/healthz") == 0


def test_tick_of_the_scheduler_renews_the_heartbeat_of_beat(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heartbeat = SchedulerTick()
    heartbeat.at -= 120
    assert not heartbeat.is_recent()
    monkeypatch.setattr(BoundedScheduler, "tick", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        run_beat(create_app(load_settings()), heartbeat, lambda: None)
    assert heartbeat.is_recent()
