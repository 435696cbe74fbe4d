"""Task schedule: the background jobs, when they run and their time limits."""

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from celery.schedules import crontab

from gateway.database.ledger.partitions import make_partitions, months_from
from gateway.jobs import telemetry
from gateway.jobs.services import Services
from gateway.ledger.reconcile import reconcile
from gateway.management.alerts.service import find_alerts
from gateway.management.keys.expiry import audit_expired_keys
from gateway.management.webhooks.service import encrypt_secrets
from gateway.tenancy.times import utc_now

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A periodic job. It may run twice at once and be cancelled at any moment."""

    name: str
    run: Callable[[Services], Awaitable[object]]
    schedule: float | crontab
    """Seconds between two runs, or times of the day in UTC."""
    expires_seconds: float
    """A run that has not begun by then is skipped: the next one follows."""
    limit_seconds: float


async def drain(services: Services) -> None:
    """Drain usage records to the ledger."""
    await services.drain.run(seconds=5.0)


async def roll_up(services: Services) -> None:
    """Make the rollups of hours and days that have new rows."""
    await services.rollups.make_all()


async def sweep(services: Services) -> None:
    """Settle requests whose gateway died."""
    before = services.sweep.lost_micros
    try:
        settled = await services.sweep.run()
    finally:
        telemetry.LOST_MICROS.inc(services.sweep.lost_micros - before)
    if settled:
        telemetry.SWEPT_RESERVATIONS.inc(settled)
        logger.warning("%d requests of dead gateways were settled as lost", settled)


async def reconcile_all(services: Services) -> None:
    """Find and heal differences between Redis and the ledger."""
    await services.drain.run(seconds=5.0)
    report = await reconcile(services.redis, services.database)
    if not report.is_clean:
        logger.warning("reconciliation found and healed differences: %s", report)


async def prepare_partitions(services: Services) -> None:
    """Create the ledger's partitions of the coming months."""
    async with services.database.writing() as transaction:
        await make_partitions(transaction, months_from(utc_now()))


async def expire(services: Services) -> None:
    """Add expired keys to the audit log, and withdraw the remainder of expired credits."""
    await audit_expired_keys(services.database, utc_now())
    await services.credits.expire_due(utc_now())


async def sign_audit(services: Services) -> None:
    """Sign the audit log's head, if there is a key."""
    if services.audit_heads is not None:
        await services.audit_heads.run()


async def alert(services: Services) -> None:
    """Create alerts for budgets that are nearly used up."""
    await find_alerts(services.database, utc_now())


async def deliver(services: Services) -> None:
    """Send due webhook events."""
    await services.webhooks.run(seconds=5.0)


async def export(services: Services) -> None:
    """Export the ledger to billing systems."""
    await services.exporter.run(seconds=5.0)


async def encrypt(services: Services) -> None:
    """Encrypt webhook secrets that are plain text or encrypted under a key to be removed."""
    if changed := await encrypt_secrets(services.database, services.box):
        logger.info("the secrets of %d webhooks were encrypted", changed)


async def validate_batches(services: Services) -> None:
    """Validate the input files of new batches."""
    await services.validator.run()


async def feed_batches(services: Services) -> None:
    """Release lines of batches to the gateways."""
    await services.feeder.run()


async def finish_batches(services: Services) -> None:
    """End batches whose lines have ended, were cancelled or have expired."""
    await services.finisher.run()


async def remove_files(services: Services) -> None:
    """Remove expired files, abandoned uploads, and the files of deleted adapters."""
    await services.files.remove_old()
    await services.adapters.remove_deleted()


async def validate_adapters(services: Services) -> None:
    """Check and copy the files of new adapters."""
    await services.adapters.validate_new()


DRAIN: Final = Task(name="drain", run=drain, schedule=1.0, expires_seconds=5.0, limit_seconds=60.0)
TASKS: Final = (
    DRAIN,
    Task(name="sweep", run=sweep, schedule=5.0, expires_seconds=10.0, limit_seconds=60.0),
    Task(name="roll_up", run=roll_up, schedule=30.0, expires_seconds=60.0, limit_seconds=600.0),
    Task(name="deliver", run=deliver, schedule=5.0, expires_seconds=10.0, limit_seconds=60.0),
    Task(name="export", run=export, schedule=5.0, expires_seconds=10.0, limit_seconds=120.0),
    Task(
        name="validate_batches",
        run=validate_batches,
        schedule=1.0,
        expires_seconds=5.0,
        limit_seconds=3000.0,
    ),
    Task(
        name="validate_adapters",
        run=validate_adapters,
        schedule=1.0,
        expires_seconds=5.0,
        limit_seconds=3000.0,
    ),
    Task(
        name="feed_batches", run=feed_batches, schedule=1.0, expires_seconds=5.0, limit_seconds=60.0
    ),
    Task(
        name="finish_batches",
        run=finish_batches,
        schedule=1.0,
        expires_seconds=5.0,
        limit_seconds=3000.0,
    ),
    Task(
        name="remove_files",
        run=remove_files,
        schedule=60.0,
        expires_seconds=60.0,
        limit_seconds=3000.0,
    ),
    Task(name="expire", run=expire, schedule=60.0, expires_seconds=60.0, limit_seconds=300.0),
    Task(
        name="sign_audit", run=sign_audit, schedule=60.0, expires_seconds=60.0, limit_seconds=300.0
    ),
    Task(name="alert", run=alert, schedule=60.0, expires_seconds=60.0, limit_seconds=300.0),
    Task(
        name="reconcile",
        run=reconcile_all,
        schedule=crontab(minute="17"),
        expires_seconds=1800.0,
        limit_seconds=3000.0,
    ),
    Task(
        name="encrypt",
        run=encrypt,
        schedule=crontab(minute="37"),
        expires_seconds=1800.0,
        limit_seconds=600.0,
    ),
    Task(
        name="prepare_partitions",
        run=prepare_partitions,
        schedule=crontab(minute="7", hour="*/6"),
        expires_seconds=3600.0,
        limit_seconds=60.0,
    ),
)
