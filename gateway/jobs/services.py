"""Services of the background jobs, opened once for each track of a process."""

from typing import Final

from gateway.accounts.webhooks.secret_box import SecretBox
from gateway.adapters.service import AdapterService
from gateway.auth.authenticator import Authenticator
from gateway.batches.checking import Validator
from gateway.batches.feeding import Feeder
from gateway.batches.files.service import FileService
from gateway.batches.finishing import Finisher
from gateway.billing.credits.service import CreditService
from gateway.billing.ledger.drain import Drain
from gateway.billing.ledger.reconcile import Reconciler
from gateway.billing.ledger.rollups import Rollups
from gateway.billing.ledger.sweep import Sweep
from gateway.jobs.audit_heads import HeadKeeper
from gateway.jobs.exports import Exporter
from gateway.jobs.outbound import Outbound
from gateway.jobs.webhooks import WebhookSender
from gateway.models.catalogue import Catalogue
from gateway.platform.changes import ChangeAnnouncer
from gateway.platform.database.engine import MOST_CONNECTIONS, Database
from gateway.platform.redis_client import MeasuredConnection, connect
from gateway.platform.settings import Settings

REDIS_CONNECTIONS: Final = 32
STATEMENT_SECONDS: Final = 60.0
"""Limit of one statement: rollups of a busy hour take longer than a request may wait."""


class JobServices:
    """One database, one Redis client, and the services that use them, until it is closed.

    Args:
        settings: the settings.
        most_connections: the most connections to the database.
    """

    def __init__(self, settings: Settings, *, most_connections: int = MOST_CONNECTIONS) -> None:
        self.redis = redis = connect(settings.redis_url, max_connections=REDIS_CONNECTIONS)
        self.database = database = Database(
            settings.database_url.get_secret_value(),
            statement_timeout_seconds=STATEMENT_SECONDS,
            most_connections=most_connections,
        )
        self.box = SecretBox(settings.plain_encryption_keys())
        self.files = FileService(settings, database)
        announcer = ChangeAnnouncer(redis)
        catalogue = Catalogue(MeasuredConnection(redis))
        authenticator = Authenticator.from_settings(settings, database)
        outbound = Outbound(allows_private=settings.webhook_allow_private)
        self.drain = Drain(redis, database)
        self.reconciler = Reconciler(redis, database)
        self.rollups = Rollups(database)
        self.sweep = Sweep(redis)
        self.credits = CreditService(database, announcer)
        self.audit_heads = HeadKeeper(settings, database)
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
        self.exporter = Exporter(settings, database)

    async def aclose(self) -> None:
        """End the work that outlasts a run, and close all connections."""
        for each in (
            *(self.adapters, self.webhooks, self.exporter, self.validator, self.finisher),
            *(self.redis, self.database),
        ):
            await each.aclose()
