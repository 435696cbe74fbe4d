"""Process-wide resources: opened at startup, closed at shutdown."""

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, fields

from fastapi import Request
from redis.asyncio import Redis
from redis.exceptions import RedisError

from contract.scripts import CommandExecutor
from contract.tasks import end_task
from gateway import telemetry
from gateway.auth.authenticator import Authenticator
from gateway.auth.oidc import OidcProvider
from gateway.auth.revocation import RevocationListener
from gateway.concurrency.fair_turns import LoopTurns
from gateway.concurrency.large_work import LargeWork
from gateway.database.engine import Database
from gateway.database.schema import require_current_schema
from gateway.dispatch.books import AdapterBook, AliasBook
from gateway.dispatch.catalogue import Catalogue
from gateway.dispatch.dispatcher import Dispatcher
from gateway.heartbeat import Heartbeat
from gateway.http.allowances import FailedLogins, Intake, UnpaidRequests
from gateway.http.services import Services
from gateway.idempotency.registry import IdempotencyRegistry
from gateway.images.fetcher import ImageFetcher
from gateway.ledger.balances import LedgerBalances
from gateway.ledger.history import ServiceHistory
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
from gateway.redis_client import MeasuredConnection, connect, describe
from gateway.responses.service import Responses
from gateway.responses.settlement import SettlementService
from gateway.settings import Settings
from gateway.store_errors import cause_of
from gateway.structure.checker import GrammarChecker
from gateway.structure.sandbox.pool import SandboxSettings
from gateway.tenancy.changes import ChangeAnnouncer

logger = logging.getLogger(__name__)

MAX_REDIS_CONNECTIONS = 64


@dataclass(frozen=True, slots=True)
class ProcessContext:
    """Everything that handlers share."""

    settings: Settings
    intake: Intake
    large_work: LargeWork
    loop_turns: LoopTurns
    unpaid: UnpaidRequests
    failed_logins: FailedLogins
    redis: "Redis"
    executor: MeasuredConnection
    """The connection to Redis that requests share."""
    database: Database
    announcer: ChangeAnnouncer
    lines_released: asyncio.Event
    """Set when lines of batches may be released."""
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
    history: ServiceHistory
    storage: Storage
    settlements: SettlementService
    responses: Responses
    idempotency: IdempotencyRegistry

    def services(self) -> Services:
        """Return the services by type."""
        shared = [getattr(self, field.name) for field in fields(self)]
        named = {Database: self.database, Redis: self.redis, CommandExecutor: self.executor}
        return Services({type(each): each for each in shared if each is not None} | named)


def context_of(request: Request) -> ProcessContext:
    """Return the context of the process that serves `request`."""
    context: ProcessContext = request.app.state.context
    return context


@asynccontextmanager
async def open_context(
    settings: Settings, *, on_failure: Callable[[], None]
) -> AsyncIterator[ProcessContext]:
    """Open connections and start the background loops; on exit, stop them in reverse order.

    The context calls `on_failure` if a bug ends a loop: otherwise the process would stop responding
    but appear healthy.
    """
    telemetry.TENANTS.assign(settings.metrics_tenants)
    async with AsyncExitStack() as stack:
        context = await _open(settings, stack)
        await _start(context, stack, on_failure)
        yield context


async def _open(settings: Settings, stack: AsyncExitStack) -> ProcessContext:
    database = Database(settings.database_url.get_secret_value())
    stack.push_async_callback(database.aclose)
    await require_current_schema(database)
    authenticator = Authenticator.from_settings(settings, database)
    redis = connect(settings.redis_url, max_connections=MAX_REDIS_CONNECTIONS)
    stack.push_async_callback(redis.aclose)
    prices = PriceBook(database, batch_percent=settings.batch_price_percent)
    await prices.refresh()
    aliases = AliasBook(database)
    await aliases.refresh()
    lines_released = asyncio.Event()
    adapters = AdapterBook(database)
    await adapters.refresh()
    listener = RevocationListener(
        redis,
        authenticator,
        on_prices_changed=prices.refresh_soon,
        on_aliases_changed=aliases.refresh_soon,
        on_lines_released=lines_released.set,
        on_adapters_changed=adapters.refresh_soon,
    )
    listener.start()
    stack.push_async_callback(listener.stop)
    executor = MeasuredConnection(redis)
    stack.push_async_callback(executor.aclose)
    catalogue = Catalogue(executor)
    dispatcher = Dispatcher(
        gateway=f"gw-{secrets.token_hex(6)}",
        client=redis,
        catalogue=catalogue,
        max_waiting_jobs=settings.max_waiting_jobs,
        max_waiting_jobs_of_tenant=settings.max_waiting_jobs_of_tenant,
        queue_timeout_seconds=settings.queue_timeout.total_seconds(),
        resume_after_seconds=settings.resume_after.total_seconds(),
    )
    # Always accept a single body of the maximum size.
    most_held = max(settings.max_held_bytes_of_tenant, settings.max_body_bytes)
    large_work = LargeWork(most_waiting_bytes=most_held, processes=settings.processes)
    stack.callback(large_work.close)
    loop_turns = LoopTurns()
    grammars = GrammarChecker(SandboxSettings())
    stack.push_async_callback(grammars.aclose)
    quotas = QuotaStore(executor)
    seeder = Seeder(quotas, LedgerBalances(database))
    reservations = Reservations(quotas, seeder)
    storage = Storage(executor, most_of_tenant=settings.max_stored_bytes_of_tenant)
    settlements = SettlementService(reservations, dispatcher, catalogue, storage)
    responses = Responses(
        redis,
        executor,
        dispatcher,
        settlements,
        loop_turns=loop_turns,
        journal_interval=settings.journal_interval,
        max_unread_bytes=settings.max_unread_bytes,
    )
    return ProcessContext(
        settings=settings,
        intake=Intake(most_bytes=most_held),
        large_work=large_work,
        loop_turns=loop_turns,
        unpaid=UnpaidRequests(settings.unpaid_requests_per_minute),
        failed_logins=FailedLogins(settings.failed_logins_per_minute),
        redis=redis,
        executor=executor,
        database=database,
        announcer=ChangeAnnouncer(redis),
        lines_released=lines_released,
        authenticator=authenticator,
        oidc=OidcProvider.from_settings(settings),
        catalogue=catalogue,
        adapters=adapters,
        aliases=aliases,
        tokenizers=TokenizerStore(catalogue.tokenizer),
        chat_templates=ChatTemplates(catalogue.chat_template, grammars.try_template),
        grammars=grammars,
        images=ImageFetcher.from_settings(settings),
        dispatcher=dispatcher,
        prices=prices,
        quotas=quotas,
        seeder=seeder,
        reservations=reservations,
        refusals=RefusalLog(executor),
        counts=PeriodCounts(executor),
        rejections=Rejections(database),
        history=ServiceHistory(database),
        storage=storage,
        settlements=settlements,
        responses=responses,
        idempotency=IdempotencyRegistry(
            executor, gateway=dispatcher.gateway, retention=settings.idempotency_retention
        ),
    )


async def _start(
    context: ProcessContext, stack: AsyncExitStack, on_failure: Callable[[], None]
) -> None:
    dispatcher, reservations = context.dispatcher, context.reservations
    await _announce(context)
    stack.push_async_callback(dispatcher.aclose)
    heartbeat = Heartbeat(
        context.settings.redis_url, dispatcher.presence, reservations, on_failure=on_failure
    )
    stack.push_async_callback(heartbeat.aclose)
    heartbeat.start()

    def report_failure(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.critical("a background loop failed; the gateway shuts down", exc_info=error)
            on_failure()

    for part in (
        context.catalogue,
        dispatcher,
        context.prices,
        context.adapters,
        context.refusals,
        context.counts,
        context.rejections,
        context.aliases,
        reservations,
        context.settlements,
        context.responses,
    ):
        task = asyncio.create_task(part.run())
        task.add_done_callback(report_failure)
        stack.push_async_callback(end_task, task)
    stack.push_async_callback(context.rejections.write)
    # Settle the requests that end at shutdown while the loops still run.
    stack.push_async_callback(reservations.aclose)
    stack.push_async_callback(context.settlements.aclose)
    stack.push_async_callback(context.responses.aclose)


async def _announce(context: ProcessContext) -> None:
    # Workers drop jobs of a gateway without a heartbeat, so send the first heartbeat before any
    # job.
    try:
        await context.dispatcher.beat()
        await context.catalogue.refresh()
    except RedisError as error:
        logger.warning("%s is not reachable yet: %s", describe(context.redis), cause_of(error))
