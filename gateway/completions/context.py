"""The services of a process, by name."""

from dataclasses import dataclass
from typing import Any, get_type_hints

from fastapi import Request
from redis.asyncio import Redis

from gateway.auth.authenticator import Authenticator
from gateway.auth.oidc import OidcProvider
from gateway.completions.idempotency.registry import IdempotencyRegistry
from gateway.completions.prompt.chat_templates import ChatTemplates
from gateway.completions.prompt.images.fetcher import ImageFetcher
from gateway.completions.prompt.tokenizers import TokenizerStore
from gateway.completions.queue.dispatcher import Dispatcher
from gateway.completions.settlement import SettlementService
from gateway.completions.stored.service import Responses
from gateway.completions.structure.checker import GrammarChecker
from gateway.http.allowances import FailedLogins, Intake, UnpaidRequests
from gateway.http.services import Services
from gateway.limits.period_counts import PeriodCounts
from gateway.limits.refusal_log import Refusals
from gateway.limits.reservations import Reservations
from gateway.limits.seeding import Seeder
from gateway.limits.storage import Storage
from gateway.limits.store import QuotaStore
from gateway.models.books import AdapterBook, AliasBook
from gateway.models.catalogue import Catalogue
from gateway.models.price_book import PriceBook
from gateway.platform.changes import ChangeAnnouncer
from gateway.platform.concurrency.fair_turns import LoopTurns
from gateway.platform.concurrency.large_work import LargeWork
from gateway.platform.database.engine import Database
from gateway.platform.redis_client import MeasuredConnection
from gateway.platform.settings import Settings


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
    refusals: Refusals
    counts: PeriodCounts
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
