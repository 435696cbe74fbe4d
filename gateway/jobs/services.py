"""Services of the background jobs, opened once for each process."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

from redis.asyncio import Redis

from gateway.accounts.changes import ChangeAnnouncer
from gateway.accounts.credit_service import CreditService
from gateway.accounts.database import Database
from gateway.accounts.ledger.rollups import Rollups
from gateway.accounts.secret_box import SecretBox
from gateway.jobs.audit_heads import HeadKeeper
from gateway.jobs.drain import Drain
from gateway.jobs.outbound import Outbound
from gateway.jobs.sweep import Sweep
from gateway.jobs.webhooks import WebhookSender
from gateway.redis_client import connect
from gateway.settings import Settings

MAX_CONNECTIONS: Final = 32
STATEMENT_SECONDS: Final = 60.0
"""Limit of one statement: rollups of a busy hour take longer than a request may wait."""


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
    audit_heads: HeadKeeper | None
    """None without a signing key."""
    box: SecretBox


@asynccontextmanager
async def open_services(settings: Settings) -> AsyncIterator[Services]:
    """Open all services, and close them at the end of the block."""
    database = Database(
        settings.database_url.get_secret_value(), statement_timeout_seconds=STATEMENT_SECONDS
    )
    redis = connect(settings.redis_url, max_connections=MAX_CONNECTIONS)
    box = SecretBox(settings.plain_encryption_keys())
    outbound = Outbound(allows_private=settings.webhook_allow_private)
    try:
        yield Services(
            redis=redis,
            database=database,
            drain=Drain(redis, database),
            rollups=Rollups(database),
            sweep=Sweep(redis),
            credits=CreditService(database, ChangeAnnouncer(redis)),
            audit_heads=HeadKeeper.from_settings(settings, database),
            webhooks=WebhookSender(database, outbound, box),
            box=box,
        )
    finally:
        await redis.aclose()
        await database.aclose()
