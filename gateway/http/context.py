"""The services of a process, by name."""

from dataclasses import dataclass
from typing import Any, get_type_hints

from fastapi import Request
from redis.asyncio import Redis

from gateway.auth.authenticator import Authenticator
from gateway.auth.oidc import OidcProvider
from gateway.concurrency.fair_turns import LoopTurns
from gateway.concurrency.large_work import LargeWork
from gateway.database.engine import Database
from gateway.dispatch.books import AdapterBook, AliasBook
from gateway.dispatch.catalogue import Catalogue
from gateway.dispatch.dispatcher import Dispatcher
from gateway.http.allowances import FailedLogins, Intake, UnpaidRequests
from gateway.http.services import Services
from gateway.idempotency.registry import IdempotencyRegistry
from gateway.images.fetcher import ImageFetcher
from gateway.ledger.rejections import Rejections
from gateway.prompt.chat_templates import ChatTemplates
from gateway.prompt.tokenizers import TokenizerStore
from gateway.quota.period_counts import PeriodCounts
from gateway.quota.price_book import PriceBook
from gateway.quota.refusal_log import RefusalLog
from gateway.quota.reservations import Reservations
from gateway.quota.seeding import Seeder
from gateway.quota.storage import Storage
from gateway.quota.store import QuotaStore
from gateway.redis_client import MeasuredConnection
from gateway.responses.service import Responses
from gateway.responses.settlement import SettlementService
from gateway.settings import Settings
from gateway.structure.checker import GrammarChecker
from gateway.tenancy.changes import ChangeAnnouncer


@dataclass(frozen=True, slots=True)
class ProcessContext:
    """Everything that handlers share."""

    settings: Settings
    intake: Intake
    large_work: LargeWork
    loop_turns: LoopTurns
    unpaid: UnpaidRequests
    failed_logins: FailedLogins
    redis: Redis
    executor: MeasuredConnection
    """The connection to Redis that requests share."""
    database: Database
    announcer: ChangeAnnouncer
    authenticator: Authenticator
    oidc: OidcProvider | None
    """The identity provider of the console."""
    catalogue: Catalogue
    adapters: AdapterBook
    aliases: AliasBook
    tokenizers: TokenizerStore
    chat_templates: ChatTemplates
    grammars: GrammarChecker
    images: ImageFetcher
    dispatcher: Dispatcher
    prices: PriceBook
    quotas: QuotaStore
    seeder: Seeder
    reservations: Reservations
    refusals: RefusalLog
    counts: PeriodCounts
    rejections: Rejections
    storage: Storage
    settlements: SettlementService
    responses: Responses
    idempotency: IdempotencyRegistry

    @classmethod
    def of(cls, services: Services) -> "ProcessContext":
        """Return the context of these services."""
        kinds = {**get_type_hints(cls), "oidc": OidcProvider}
        found: dict[str, Any] = {name: services.find(kind) for name, kind in kinds.items()}
        return cls(**found)


def context_of(request: Request) -> ProcessContext:
    """Return the context of the process that serves `request`."""
    context: ProcessContext = request.app.state.context
    return context
