"""Health of the deployment, from what gateways, workers and jobs have stored.

The limits are those of the alerts in `ops/prometheus/rules`, whose names the problems have.
"""

import asyncio
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime, timedelta
from operator import itemgetter
from typing import Any, Final, NamedTuple, TypeAlias

from redis.asyncio import Redis

from contract import keys
from gateway.accounts.keys.service import count_expiring_keys
from gateway.billing.exports.store import ExportBody, ExportStore
from gateway.billing.ledger.history import HOURS, RecordedService, ServiceHistory
from gateway.billing.ledger.pending import Pending, pending_usage
from gateway.billing.status.service import LONG_WAIT_SECONDS, STALE_SECONDS
from gateway.billing.usage.parts import UsageFilter
from gateway.billing.usage.periods import HOUR, Span
from gateway.billing.usage.service import LatencyBody, UsageService
from gateway.completions.queue.presence import ALIVE_SECONDS, known_gateways
from gateway.console.formats import duration
from gateway.console.operators.models import FAILED, LATE_MS, Workers, all_workers, sequences
from gateway.console.tables import Card, Cell, Column, Step, Table
from gateway.http.services import Services
from gateway.limits.refusal_log import Period, PeriodCounts, Totals
from gateway.models.catalogue import Catalogue, ServedModel
from gateway.models.waits import LongestWaits
from gateway.platform.database.engine import Database
from gateway.platform.database.tables import ExportBatchState
from gateway.records.times import hour_of, to_time, utc_now

TARGET_PERCENT: Final = 99.9
"""The objective of the availability; what it allows to fail is the error budget."""
LEDGER_LAG_SECONDS: Final = 300
EXPORT_LAG: Final = timedelta(hours=2)
JOB_SECONDS: Final = 300
SLOW_JOBS: Final = {"reconcile": 10_800, "encrypt": 7_200, "prepare_partitions": 43_200}
"""Background jobs that may succeed less often than `JOB_SECONDS`."""


_Check: TypeAlias = tuple[str, bool, str, tuple[str, str]]
"""Name of an alert without its prefix, whether its condition is met, text, and link with label."""
_UNDECIDED: Final = (ExportBatchState.REJECTED, ExportBatchState.UNCERTAIN)
_MODELS = ("/console/models", "Models")
_REQUESTS, _MONEY = ("/console/requests?range=24h", "Requests"), ("/console/money", "Money")
_FAILED = (FAILED, "Failed requests")
_JOBS, _GATEWAYS = ("#jobs", "Background jobs"), ("#gateways", "Gateways")


class Health(NamedTuple):
    """What the first page of operators shows first."""

    cards: list[Card]
    problems: list[Step]
    gateways: Table
    jobs: Table
    workers: Workers


class _Numbers(NamedTuple):
    now: datetime
    history: RecordedService
    latency: LatencyBody
    refused: Totals
    waits: Mapping[str, int]
    models: list[ServedModel]
    workers: Workers
    is_stale: bool
    gateways: Mapping[str, int]
    pending: Pending
    jobs: Mapping[str, int]
    exports: list[ExportBody]
    expiring_keys: int


async def read_health(services: Services) -> Health:
    """Return the state of the deployment. Raises RedisError and StoreUnavailableError."""
    found = await _read(services)
    alive_ms = int((found.now.timestamp() - ALIVE_SECONDS) * 1000)
    late = {name for name, at_ms in found.jobs.items() if _is_late(name, at_ms, found.now)}
    time = Column("Latest (UTC)", lambda each: to_time(each[1]), "time")
    return Health(
        list(_cards(found)),
        _problems(found, alive_ms, sorted(late)),
        Table(
            "Gateways",
            (
                Column("Gateway", lambda each: each[0], "mono"),
                Column("State", lambda each: _cell("silent" if each[1] < alive_ms else "")),
                time,
            ),
            sorted(found.gateways.items()),
            "No gateway has a heartbeat.",
        ),
        Table(
            "Background jobs",
            (
                Column("Job", lambda each: each[0].replace("_", " ")),
                Column("State", lambda each: _cell("late" if each[0] in late else "")),
                time,
            ),
            sorted(found.jobs.items()),
            "No background job has succeeded yet.",
        ),
        found.workers,
    )


async def _read(services: Services) -> _Numbers:
    now, redis, database = utc_now(), services[Redis], services[Database]
    last_day = Span(hour_of(now) - (HOURS - 1) * HOUR, now)
    history, latency, refused, waits, workers = await asyncio.gather(
        services[ServiceHistory].get(),
        services.make(UsageService).latency(UsageFilter(tenant_id=None), last_day),
        services[PeriodCounts].refusals(Period.HOUR),
        services[LongestWaits].of_last_day(),
        all_workers(services),
    )
    done: Any = redis.hgetall(keys.JOBS_DONE)
    gateways, pending, jobs, expiring_keys = await asyncio.gather(
        known_gateways(redis),
        pending_usage(redis),
        done,
        count_expiring_keys(database, now, timedelta(days=1)),
    )
    async with database.reading() as transaction:
        exports = await ExportStore(transaction).states()
    models, is_stale = services[Catalogue].models, services[Catalogue].age_seconds > STALE_SECONDS
    done_ms = {name.decode(): int(at_ms) for name, at_ms in jobs.items()}
    sql = (history, latency, refused, waits, models, workers, is_stale)
    return _Numbers(now, *sql, gateways, pending, done_ms, exports, expiring_keys)


def _cards(found: _Numbers) -> Iterator[Card]:
    served, late_ms = found.history.last_day, found.latency.p99_ms or 0
    spent = _budget_spent(found)
    yield Card(
        f"Availability, {HOURS} h",
        "no requests" if served.availability is None else f"{served.availability:.2f} %",
        f"{served.failed_requests:,} of {served.requests:,} failed or were rejected by a fault: "
        f"{spent:.0f} % of the error budget"
        if found.history.is_known
        else "the history cannot be read",
        "bad" if spent >= 100 else "",
    )
    yield Card(
        f"First token, {HOURS} h",
        duration(found.latency.p50_ms or 0) if found.latency.requests else "no tokens",
        f"median of {found.latency.requests:,} requests; 99 % within {duration(late_ms)}"
        if found.latency.requests
        else "in this time",
        "bad" if late_ms > LATE_MS else "",
    )
    wait = max((each.status.oldest_wait_seconds for each in found.models), default=0.0)
    model, longest_ms = max(found.waits.items(), key=itemgetter(1), default=("", 0))
    waiting = sum(each.status.waiting_jobs for each in found.models)
    batch = sum(each.status.waiting_batch_jobs for each in found.models)
    yield Card(
        f"Longest wait, {HOURS} h",
        duration(longest_ms),
        f"{model + '; ' if model else ''}now {duration(1000 * wait)}: {waiting:,} jobs of requests "
        f"and {batch:,} of batches wait",
        "warn" if max(1000 * wait, longest_ms) > 1000 * LONG_WAIT_SECONDS else "",
        "/console/models",
    )
    codes = Counter[str]()
    for names, count in found.refused.counts.items():
        codes[names[-1]] += count
    yield Card(
        f"Rejected, {HOURS} h",
        f"{codes.total():,}",
        ", ".join(f"{code} {count:,}" for code, count in codes.most_common(3)) or "no request",
        href="/console/refusals",
    )
    running = sum(each.status.leased_jobs for each in found.models)
    most = sum(map(sequences, found.workers.values()))
    count = sum(not each.silent_ms for seen in found.workers.values() for each in seen)
    yield Card(
        "Utilisation now",
        f"{100 * running / most:.0f} %" if most else "no worker",
        f"Running jobs: {running:,}; workers: {count:,}, for {most:,} sequences at once",
        href="/console/models",
    )


def _problems(found: _Numbers, alive_ms: int, late: Iterable[str]) -> list[Step]:
    pending, late_share = found.pending, 100 - TARGET_PERCENT
    checks = [
        ("RedisErrors", found.is_stale, "This gateway cannot read the queue", _MODELS),
        ("SqlErrors", not found.history.is_known, "The database does not answer in time", _MODELS),
        (
            "AvailabilityBudgetBurn",
            _budget_spent(found) >= 100,
            f"More than {late_share:.1f} % of the requests of {HOURS} h failed",
            _FAILED,
        ),
        (
            "FirstTokenBudgetBurn",
            (found.latency.p99_ms or 0) > LATE_MS,
            f"More than 1 % of the first tokens of {HOURS} h took over {duration(LATE_MS)}",
            _REQUESTS,
        ),
        ("JobsNotRunning", not found.jobs, "No background job has succeeded", _JOBS),
        *(("JobsNotRunning", True, f"The job {name} does not succeed", _JOBS) for name in late),
        (
            "LedgerLag",
            pending.lag_seconds > LEDGER_LAG_SECONDS,
            f"Usage of {duration(1000 * pending.lag_seconds)} ago is not in the ledger",
            _JOBS,
        ),
        (
            "ReservationLeak",
            pending.overdue_reservations > 0,
            f"No gateway renews {pending.overdue_reservations:,} reservations",
            _JOBS,
        ),
        (
            "KeyExpiry",
            found.expiring_keys > 0,
            f"{found.expiring_keys:,} keys expire within a day",
            ("/console/tenants", "Tenants"),
        ),
        *(
            ("ProcessDown", at_ms < alive_ms, f"The gateway {name} is silent", _GATEWAYS)
            for name, at_ms in found.gateways.items()
        ),
        *(check for model in found.models for check in _model_checks(model)),
        *(
            (
                "ProcessDown",
                each.silent_ms > 0,
                f"The worker {each.card.id} of {model} is silent for {duration(each.silent_ms)}",
                _MODELS,
            )
            for model, workers in found.workers.items()
            for each in workers
        ),
        *(check for sink in found.exports for check in _export_checks(sink, found.now)),
    ]
    return [Step(f"{text} (Sluice{name}).", *link) for name, is_met, text, link in checks if is_met]


def _model_checks(model: ServedModel) -> Iterator[_Check]:
    name, status = model.card.model, model.status
    is_served = model.is_ready or (model.is_asleep and not status.waiting_jobs)
    yield "NoReadyWorker", not is_served, f"No worker serves {name}", _MODELS
    is_slow = status.oldest_wait_seconds > LONG_WAIT_SECONDS
    text = f"A request for {name} has waited for {duration(1000 * status.oldest_wait_seconds)}"
    yield "QueueSlow", is_slow, text, _MODELS


def _export_checks(sink: ExportBody, now: datetime) -> Iterator[_Check]:
    is_late = sink.oldest_at is not None and now - sink.oldest_at > EXPORT_LAG
    yield "ExportStalled", is_late, f"The sink {sink.name} lacks usage of hours ago", _MONEY
    is_undecided = any(sink.batches[state] for state in _UNDECIDED)
    text = f"Usage for the sink {sink.name} waits for a decision"
    yield "ExportRejected", is_undecided, text, _MONEY


def _budget_spent(found: _Numbers) -> float:
    """Return the percentage of the error budget of the last hours that is spent."""
    served = found.history.last_day
    allowed = served.requests * (100 - TARGET_PERCENT) / 100
    return 100 * served.failed_requests / allowed if allowed else 0.0


def _is_late(job: str, at_ms: int, now: datetime) -> bool:
    limit = SLOW_JOBS.get(job, JOB_SECONDS)
    return now - to_time(at_ms) > timedelta(seconds=limit)


def _cell(problem: str) -> Cell:
    return Cell(problem, kind="bad") if problem else Cell("fine", kind="good")
