"""Problems that the operators' first page names, and their limits."""

from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import Any

from contract.messages import WorkerCard, WorkerState
from contract.queue import ModelStatus
from gateway.billing.exports.store import ExportBody
from gateway.billing.ledger.history import RecordedService, Served
from gateway.billing.ledger.pending import Pending
from gateway.billing.status.service import LONG_WAIT_SECONDS
from gateway.billing.usage.service import LatencyBody
from gateway.console.operators import health
from gateway.console.operators.models import LATE_MS
from gateway.limits.refusal_log import Totals
from gateway.models.catalogue import ServedModel
from gateway.platform.database.tables import ExportBatchState
from ops.dashboards.limits import AVAILABILITY, FIRST_TOKEN, alert_limit, alerts
from tests.support.cases import all_cases

NOW = datetime(2026, 11, 27, 12, 30, tzinfo=UTC)
SECOND = timedelta(seconds=1)
IDLE = Pending(0.0, 0, 0, 0)


def _history(failed: int, *, is_known: bool = True) -> RecordedService:
    hours = {NOW.replace(minute=0): {"m": Served(10_000, failed)}}
    return RecordedService(NOW, is_known, hours=hours)


def _latency(p99_ms: int) -> LatencyBody:
    return LatencyBody(requests=1, p50_ms=1, p99_ms=p99_ms)


FINE = health._Numbers(
    now=NOW,
    history=_history(9),
    latency=_latency(LATE_MS),
    refused=Totals(Counter(), is_complete=True),
    waits={},
    models=[],
    workers={},
    is_stale=False,
    gateways={"gw-1": 6},
    pending=IDLE,
    jobs={"drain": 0},
    exports=[],
    expiring_keys=0,
)


def _problems(numbers: health._Numbers, *late: str) -> list[str]:
    return [step.text for step in health._problems(numbers, 6, late)]


def _model(*, workers: int = 1, wait: float = 30.0, waiting: int = 0, **card: Any) -> ServedModel:
    announced = WorkerCard("w", "m", card.pop("state", WorkerState.READY), "vllm", 1, **card)
    return ServedModel(announced, ModelStatus(workers, waiting, 0, oldest_wait_seconds=wait))


def _sink(*, age: timedelta = health.EXPORT_LAG, **batches: int) -> ExportBody:
    return ExportBody(
        name="s",
        kind="openmeter",
        created_at=NOW,
        paused_at=None,
        lag_rows=1,
        oldest_at=NOW - age,
        batches=dict.fromkeys(ExportBatchState, 0) | batches,
        held_micros=0,
        failures=0,
        next_attempt_at=None,
        last_error="",
    )


def test_values_at_their_limits_are_no_problems() -> None:
    sleeping = _model(workers=0, scales_to_zero=True)
    numbers = FINE._replace(models=[_model(), sleeping], exports=[_sink(held=1)])
    assert _problems(numbers) == []


@all_cases(
    ("changes", "alert"),
    [
        ({"is_stale": True}, "RedisErrors"),
        ({"history": _history(0, is_known=False)}, "SqlErrors"),
        ({"history": _history(10)}, "AvailabilityBudgetBurn"),
        ({"latency": _latency(LATE_MS + 1)}, "FirstTokenBudgetBurn"),
        ({"jobs": {}}, "JobsNotRunning"),
        ({"pending": IDLE._replace(lag_seconds=301.0)}, "LedgerLag"),
        ({"pending": IDLE._replace(overdue_reservations=1)}, "ReservationLeak"),
        ({"expiring_keys": 1}, "KeyExpiry"),
        ({"gateways": {"gw-1": 5}}, "ProcessDown"),
        ({"models": [_model(workers=0)]}, "NoReadyWorker"),
        ({"models": [_model(workers=0, waiting=1, scales_to_zero=True)]}, "NoReadyWorker"),
        ({"models": [_model(wait=30.1)]}, "QueueSlow"),
        ({"exports": [_sink(age=health.EXPORT_LAG + SECOND)]}, "ExportStalled"),
        ({"exports": [_sink(rejected=1)]}, "ExportRejected"),
        ({"exports": [_sink(uncertain=1)]}, "ExportRejected"),
    ],
)
def test_each_problem_has_the_name_of_its_alert(changes: dict[str, Any], alert: str) -> None:
    [text] = _problems(FINE._replace(**changes))
    assert text.endswith(f"(Sluice{alert}).")
    assert f"Sluice{alert}" in alerts()


def test_late_jobs_are_problems() -> None:
    assert _problems(FINE, "drain") == ["The job drain does not succeed (SluiceJobsNotRunning)."]
    for job, seconds in (("drain", 300), ("reconcile", 10_800)):
        for age, is_late in ((seconds, False), (seconds + 1, True)):
            at_ms = int((NOW.timestamp() - age) * 1000)
            assert health._is_late(job, at_ms, NOW) is is_late, (job, age)


def test_limits_are_those_of_the_alerts() -> None:
    assert 100 * AVAILABILITY.target == health.TARGET_PERCENT
    assert FIRST_TOKEN.target == 0.99
    assert alert_limit("SluiceLedgerLag").value == health.LEDGER_LAG_SECONDS
    assert alert_limit("SluiceQueueSlow").value == LONG_WAIT_SECONDS
    assert alert_limit("SluiceExportStalled").value == health.EXPORT_LAG.total_seconds()
    assert alert_limit("SluiceJobsNotRunning").value == health.JOB_SECONDS
    limit = alert_limit("SluiceReconciliationOverdue").value
    assert limit == health.SLOW_JOBS["reconcile"]
