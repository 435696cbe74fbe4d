"""Task schedule: the background jobs, their services, tracks and time limits."""

import logging
from collections.abc import Awaitable, Callable
from enum import StrEnum
from typing import Final, NamedTuple

from celery.schedules import crontab

from gateway.accounts.keys.service import audit_expired_keys
from gateway.accounts.webhooks.secret_box import SecretBox
from gateway.accounts.webhooks.service import encrypt_secrets
from gateway.adapters.service import AdapterService
from gateway.auth.authenticator import Authenticator
from gateway.batches.feeding import Feeder
from gateway.batches.files.service import FileService
from gateway.batches.finishing import Finisher
from gateway.batches.validator import Validator
from gateway.billing.alerts import find_alerts
from gateway.billing.anomalies import learn_limits
from gateway.billing.credits.service import CreditService
from gateway.billing.credits.spending import fold
from gateway.billing.ledger.drain import Drain
from gateway.billing.ledger.reconcile import Reconciler, ReconcileReport
from gateway.billing.ledger.rollups import Rollups
from gateway.billing.ledger.sweep import Sweep
from gateway.jobs import telemetry
from gateway.jobs.audit_heads import HeadKeeper
from gateway.jobs.exports import Exporter
from gateway.jobs.mail import Mailer
from gateway.jobs.outbound import Outbound
from gateway.jobs.prompt_log import remove_expired_logs
from gateway.jobs.spend_alerts import send_spend_alerts
from gateway.jobs.webhooks import WebhookSender
from gateway.limits.store import QuotaStore
from gateway.models.catalogue import Catalogue
from gateway.platform.changes import ChangeAnnouncer
from gateway.platform.database.engine import MOST_CONNECTIONS, Database
from gateway.platform.database.partitions import make_partitions, months_from
from gateway.platform.redis_client import connect, shared_connection
from gateway.platform.settings import Settings
from gateway.records.times import utc_now

REDIS_CONNECTIONS: Final = 32
STATEMENT_SECONDS: Final = 60.0
"""Limit of one statement: rollups of a busy hour take longer than a request may wait."""


class JobServices:
    """One database, one Redis client, and the services that use them, until it is closed."""

    def __init__(self, settings: Settings, *, most_connections: int = MOST_CONNECTIONS) -> None:
        self.settings = settings
        self.redis = redis = connect(settings.redis_url, max_connections=REDIS_CONNECTIONS)
        self.database = database = Database(
            settings.database_url.get_secret_value(),
            statement_timeout_seconds=STATEMENT_SECONDS,
            most_connections=most_connections,
        )
        self.box = SecretBox(settings.plain_encryption_keys())
        self.files = FileService(settings, database)
        self.announcer = announcer = ChangeAnnouncer(redis)
        executor = shared_connection(redis)
        catalogue = Catalogue(executor)
        authenticator = Authenticator.from_settings(settings, database)
        outbound = Outbound(allows_private=settings.webhook_allow_private)
        self.drain = Drain(redis, database)
        self.reconciler = Reconciler(redis, database)
        self.quotas = QuotaStore(executor)
        self.rollups = Rollups(database)
        self.sweep = Sweep(redis)
        self.credits = CreditService(database, announcer)
        self.audit_heads = HeadKeeper(settings, database)
        dialect = settings.default_dialect
        self.validator = Validator(database, self.files, catalogue, authenticator, dialect)
        self.feeder = Feeder(redis, database, catalogue, announcer)
        self.finisher = Finisher(database, self.files)
        self.adapters = AdapterService.of(settings, database, announcer, catalogue)
        self.mailer = Mailer.of(settings)
        self.webhooks = WebhookSender(database, outbound, self.box, self.mailer)
        self.exporter = Exporter(settings, database)

    async def aclose(self) -> None:
        """End the work that outlasts a run, and close all connections."""
        for each in (
            *(self.adapters, self.webhooks, self.exporter, self.validator, self.finisher),
            *(self.redis, self.database),
        ):
            await each.aclose()


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
    before, settled_before = services.sweep.lost_micros, services.sweep.settled_requests
    try:
        await services.sweep.run()
    finally:
        telemetry.LOST_MICROS.inc(services.sweep.lost_micros - before)
        if settled := services.sweep.settled_requests - settled_before:
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


async def mail_spend_alerts(services: JobServices) -> None:
    """Mail the spend alerts whose amounts are spent."""
    await send_spend_alerts(services.database, services.mailer, utc_now())


async def alert(services: JobServices) -> None:
    """Add events of budgets, spend limits and credits that are almost used up."""
    await find_alerts(services.database, services.quotas, utc_now())


async def learn(services: JobServices) -> None:
    """Set the automatic spend limits of keys."""
    await learn_limits(services.database, services.announcer, utc_now())


async def expire_logs(services: JobServices) -> None:
    """Remove old entries of prompt logs."""
    await remove_expired_logs(services.settings, services.database, utc_now())


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
    Task("fold", lambda services: fold(services.database, seconds=SLICE_SECONDS), 30.0),
    Task("deliver", lambda services: services.webhooks.run(seconds=5.0), 5.0),
    Task("validate_batches", lambda services: services.validator.run(), 1.0),
    Task("feed_batches", lambda services: services.feeder.run(), 1.0),
    Task("finish_batches", lambda services: services.finisher.run(), 1.0),
    Task("validate_adapters", lambda services: services.adapters.validate_new(), 1.0),
    Task("remove_files", lambda services: services.files.remove_all_old(), 60.0),
    Task("remove_adapters", lambda services: services.adapters.remove_ended(), 60.0),
    Task("expire_keys", lambda services: audit_expired_keys(services.database, utc_now()), 60.0),
    Task("expire_credits", lambda services: services.credits.expire_due(utc_now()), 60.0),
    Task("sign_audit", lambda services: services.audit_heads.run(), 60.0),
    Task("alert", alert, 60.0),
    Task("mail_spend_alerts", mail_spend_alerts, 60.0),
    Task("learn_limits", learn, 300.0),
    Task("reconcile", reconcile, 60.0),
    Task("expire_prompt_logs", expire_logs, crontab(minute="17")),
    Task("encrypt", encrypt, crontab(minute="37")),
    Task("prepare_partitions", prepare_partitions, crontab(minute="7", hour="*/6")),
)
