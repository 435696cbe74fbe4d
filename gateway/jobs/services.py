"""Services of the background jobs, opened once for each process."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from redis.asyncio import Redis

from gateway.adapters.service import AdapterService
from gateway.auth.authenticator import Authenticator
from gateway.batches.checking import Validator
from gateway.batches.feeding import Feeder
from gateway.batches.finishing import Finisher
from gateway.database.engine import Database
from gateway.database.ledger.rollups import Rollups
from gateway.dispatch.catalogue import Catalogue
from gateway.files.service import FileService
from gateway.jobs.audit_heads import HeadKeeper
from gateway.jobs.exports import Exporter
from gateway.jobs.outbound import Outbound
from gateway.jobs.webhooks import WebhookSender
from gateway.ledger.connections import open_ledger
from gateway.ledger.drain import Drain
from gateway.ledger.sweep import Sweep
from gateway.management.credits.service import CreditService
from gateway.management.webhooks.secret_box import SecretBox
from gateway.redis_client import MeasuredConnection
from gateway.settings import Settings
from gateway.tenancy.changes import ChangeAnnouncer


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """One database, one Redis client, and the services that use them."""

    redis: Redis
    database: Database
    drain: Drain
    rollups: Rollups
    sweep: Sweep
    credits: CreditService
    webhooks: WebhookSender
    exporter: Exporter
    validator: Validator
    feeder: Feeder
    finisher: Finisher
    files: FileService
    adapters: AdapterService
    audit_heads: HeadKeeper | None
    """None without a signing key."""
    box: SecretBox


@asynccontextmanager
async def open_services(settings: Settings) -> AsyncIterator[Services]:
    """Open all services, and close them at the end of the block."""
    box = SecretBox(settings.plain_encryption_keys())
    outbound = Outbound(allows_private=settings.webhook_allow_private)
    async with open_ledger(settings) as (redis, database):
        files = FileService.of(settings, database)
        catalogue = Catalogue(MeasuredConnection(redis))
        announcer = ChangeAnnouncer(redis)
        authenticator = Authenticator.from_settings(settings, database)
        services = Services(
            validator=Validator(
                database, files, catalogue, authenticator, default_dialect=settings.default_dialect
            ),
            feeder=Feeder(redis, database, catalogue, ChangeAnnouncer(redis)),
            finisher=Finisher(database, files),
            files=files,
            adapters=AdapterService.of(settings, database, announcer, catalogue),
            redis=redis,
            database=database,
            drain=Drain(redis, database),
            rollups=Rollups(database),
            sweep=Sweep(redis),
            credits=CreditService(database, announcer),
            audit_heads=HeadKeeper.from_settings(settings, database),
            webhooks=WebhookSender(database, outbound, box),
            exporter=Exporter.from_settings(settings, database),
            box=box,
        )
        try:
            yield services
        finally:
            for each in (
                services.adapters,
                services.webhooks,
                services.exporter,
                services.validator,
                services.finisher,
            ):
                await each.aclose()
