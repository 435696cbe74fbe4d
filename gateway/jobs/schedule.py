"""Task schedule: the background jobs, their tracks, when they run and their time limits."""

import logging
from collections.abc import Awaitable, Callable
from enum import StrEnum
from typing import Final, NamedTuple

from celery.schedules import crontab

from gateway.accounts.keys.expiry import audit_expired_keys
from gateway.accounts.webhooks.service import encrypt_secrets
from gateway.billing.alerts import find_alerts
from gateway.billing.ledger.reconcile import ReconcileReport
from gateway.jobs import telemetry
from gateway.jobs.services import JobServices
from gateway.platform.database.partitions import make_partitions, months_from
from gateway.records.times import utc_now

SLICE_SECONDS: Final = 20.0
"""How long a run of a long job works before it leaves the rest to the next run."""

logger = logging.getLogger(__name__)


class Track(StrEnum):
    """A queue of runs, by its name in Redis. Each track has its own thread and connections."""

    LEDGER = "sluice"
    """What moves money: short runs, which nothing else may delay."""
    LONG = "sluice-long"
    """Everything else, in slices."""


class Task(NamedTuple):
    """A periodic job. It may run twice at once and be cancelled at any moment."""

    name: str
    run: Callable[[JobServices], Awaitable[object]]
    """Works for a part of a minute. The next run continues."""
    schedule: float | crontab
    """Seconds between two runs, or times of the day in UTC."""
    track: Track = Track.LONG
    limit_seconds: float = 300.0

    @property
    def expires_seconds(self) -> float:
        """A run that has not begun by then is skipped: the next one follows."""
        return 1800.0 if isinstance(self.schedule, crontab) else max(self.schedule, 10.0)


async def sweep(services: JobServices) -> None:
    """Settle requests whose gateway died."""
    before = services.sweep.lost_micros
    try:
        settled = await services.sweep.run()
    finally:
        telemetry.LOST_MICROS.inc(services.sweep.lost_micros - before)
    if settled:
        telemetry.SWEPT_RESERVATIONS.inc(settled)
        logger.warning("%d requests of dead gateways were settled as lost", settled)


async def reconcile(services: JobServices) -> None:
    """Find and heal some differences between Redis and the ledger."""
    report = ReconcileReport()
    try:
        await services.reconciler.run(report, seconds=SLICE_SECONDS)
    finally:
        if not report.is_clean:
            logger.warning("reconciliation found and healed differences: %s", report)


async def prepare_partitions(services: JobServices) -> None:
    """Create the ledger's partitions of the coming months."""
    async with services.database.writing() as transaction:
        await make_partitions(transaction, months_from(utc_now()))


async def encrypt(services: JobServices) -> None:
    """Encrypt webhook secrets that are plain text or encrypted under a key to be removed."""
    if changed := await encrypt_secrets(services.database, services.box):
        logger.info("the secrets of %d webhooks were encrypted", changed)


DRAIN: Final = Task(
    "drain", lambda services: services.drain.run(seconds=5.0), 1.0, Track.LEDGER, 60.0
)
TASKS: Final = (
    DRAIN,
    Task("sweep", sweep, 5.0, Track.LEDGER, 60.0),
    Task("export", lambda services: services.exporter.run(seconds=5.0), 5.0, Track.LEDGER, 60.0),
    Task("roll_up", lambda services: services.rollups.make_all(seconds=SLICE_SECONDS), 30.0),
    Task("deliver", lambda services: services.webhooks.run(seconds=5.0), 5.0),
    Task("validate_batches", lambda services: services.validator.run(), 1.0),
    Task("feed_batches", lambda services: services.feeder.run(), 1.0),
    Task("finish_batches", lambda services: services.finisher.run(), 1.0),
    Task("validate_adapters", lambda services: services.adapters.validate_new(), 1.0),
    Task("remove_files", lambda services: services.files.remove_old(), 60.0),
    Task("remove_adapters", lambda services: services.adapters.remove_ended(), 60.0),
    Task("expire_keys", lambda services: audit_expired_keys(services.database, utc_now()), 60.0),
    Task("expire_credits", lambda services: services.credits.expire_due(utc_now()), 60.0),
    Task("sign_audit", lambda services: services.audit_heads.run(), 60.0),
    Task("alert", lambda services: find_alerts(services.database, utc_now()), 60.0),
    Task("reconcile", reconcile, 60.0),
    Task("encrypt", encrypt, crontab(minute="37")),
    Task("prepare_partitions", prepare_partitions, crontab(minute="7", hour="*/6")),
)
