"""Services of the background jobs, opened once for each process."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from redis.asyncio import Redis

from gateway.accounts.webhooks.secret_box import SecretBox
from gateway.adapters.service import AdapterService
from gateway.auth.authenticator import Authenticator
from gateway.batches.checking import Validator
from gateway.batches.feeding import Feeder
from gateway.batches.files.service import FileService
from gateway.batches.finishing import Finisher
from gateway.billing.credits.service import CreditService
from gateway.billing.ledger.connections import open_ledger
from gateway.billing.ledger.drain import Drain
from gateway.billing.ledger.rollups import Rollups
from gateway.billing.ledger.sweep import Sweep
from gateway.jobs.audit_heads import HeadKeeper
from gateway.jobs.exports import Exporter
from gateway.jobs.outbound import Outbound
from gateway.jobs.webhooks import WebhookSender
from gateway.models.catalogue import Catalogue
from gateway.platform.changes import ChangeAnnouncer
from gateway.platform.database.engine import Database
from gateway.platform.redis_client import MeasuredConnection
from gateway.platform.settings import Settings


class Services:
    """One database, one Redis client, and the services that use them."""

    def __init__(self, settings: Settings, redis: Redis, database: Database) -> None:
        self.redis = redis
        self.database = database
        self.box = SecretBox(settings.plain_encryption_keys())
        self.files = FileService(settings, database)
        announcer = ChangeAnnouncer(redis)
        catalogue = Catalogue(MeasuredConnection(redis))
        authenticator = Authenticator.from_settings(settings, database)
        outbound = Outbound(allows_private=settings.webhook_allow_private)
        self.drain = Drain(redis, database)
        self.rollups = Rollups(database)
        self.sweep = Sweep(redis)
        self.credits = CreditService(database, announcer)
        self.audit_heads = HeadKeeper.from_settings(settings, database)
        self.validator = Validator(
            database,
            self.files,
            catalogue,
            authenticator,
            default_dialect=settings.default_dialect,
        )
        self.feeder = Feeder(redis, database, catalogue, announcer)
        self.finisher = Finisher(database, self.files)
        self.adapters = AdapterService.of(settings, database, announcer, catalogue)
        self.webhooks = WebhookSender(database, outbound, self.box)
        self.exporter = Exporter.from_settings(settings, database)

    async def aclose(self) -> None:
        """End the work that outlasts a run."""
        for each in (
            self.adapters,
            self.webhooks,
            self.exporter,
            self.validator,
            self.finisher,
        ):
            await each.aclose()


@asynccontextmanager
async def open_services(settings: Settings) -> AsyncIterator[Services]:
    """Open all services, and close them at the end of the block."""
    async with open_ledger(settings) as (redis, database):
        services = Services(settings, redis, database)
        try:
            yield services
        finally:
            await services.aclose()
