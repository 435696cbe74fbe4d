"""The services of a gateway process: opened at startup, closed in reverse order at shutdown."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any, Final, Protocol

from redis.asyncio import Redis
from redis.exceptions import RedisError

from common.redis_url import describe
from common.tasks import end_task
from contract import keys
from contract.scripts import CommandExecutor
from gateway.auth.authenticator import Authenticator
from gateway.auth.oidc import OidcProvider
from gateway.auth.revocation import RevocationListener
from gateway.batches.chunk_runner import LinesReleased
from gateway.batches.line_runner import LineRunner
from gateway.billing.ledger.history import ServiceHistory
from gateway.billing.ledger.store import read_balances
from gateway.completions.admission.call import RequestReader
from gateway.completions.admission.check import RequestChecker
from gateway.completions.admission.chunks import PromptChunks
from gateway.completions.admission.continuing import Continuations
from gateway.completions.admission.diagnostics import CacheDiagnostics
from gateway.completions.admission.idempotency import EarlierResponses
from gateway.completions.admission.model_choice import Models
from gateway.completions.admission.repeats import Repeats
from gateway.completions.admission.submit import RequestSubmitter
from gateway.completions.endpoints.generation import Completions
from gateway.completions.endpoints.models import ModelList
from gateway.completions.endpoints.stored import StoredCompletions
from gateway.completions.endpoints.tokenize import Tokenization
from gateway.completions.prompt.audio.decoder import AudioDecoder
from gateway.completions.prompt.chat_templates import ChatTemplates
from gateway.completions.prompt.images.fetcher import ImageFetcher
from gateway.completions.prompt.segments import SegmentCache
from gateway.completions.prompt.tokenizers import TokenizerStore
from gateway.completions.queue.dispatcher import Dispatcher
from gateway.completions.queue.presence import new_gateway
from gateway.completions.sealing import Sealer
from gateway.completions.sending.respond import ResponseSender
from gateway.completions.settlement import SettlementService
from gateway.completions.stored.kept import KeptResponses
from gateway.completions.stored.prompt_log import PromptLogs
from gateway.completions.stored.service import Responses
from gateway.completions.structure.checker import GrammarChecker
from gateway.completions.structure.sandbox.pool import SandboxSettings
from gateway.http.allowances import BodyBytes, FailedLogins, UnpaidRequests
from gateway.http.authorization import Authorizer
from gateway.http.body import BodyReader
from gateway.http.services import Services
from gateway.limits.refusal_log import PeriodCounts, Refusals
from gateway.limits.reservations import Reservations
from gateway.limits.seeding import Seeder
from gateway.limits.store import QuotaStore
from gateway.limits.stored_bytes import Storage
from gateway.models.alias_and_adapter_caches import AdapterBook, AliasBook
from gateway.models.catalogue import Catalogue
from gateway.models.price_book import PriceBook
from gateway.models.waits import LongestWaits
from gateway.platform import telemetry
from gateway.platform.changes import ChangeAnnouncer
from gateway.platform.concurrency.fair_turns import LoopTurns
from gateway.platform.concurrency.large_work import LargeWork
from gateway.platform.database.engine import Database
from gateway.platform.database.schema import require_current_schema
from gateway.platform.redis_client import connect, shared_connection
from gateway.platform.settings import Settings
from gateway.platform.store_errors import cause_of
from gateway.process.heartbeat import Heartbeat

logger = logging.getLogger(__name__)

MAX_REDIS_CONNECTIONS: Final = 64


class _Loop(Protocol):
    async def run(self) -> None: ...


_LOOPS: Final[tuple[type[_Loop], ...]] = (
    Catalogue,
    Dispatcher,
    PriceBook,
    AdapterBook,
    Refusals,
    PeriodCounts,
    LongestWaits,
    AliasBook,
    Reservations,
    SettlementService,
    Responses,
)
"""Services that run in the background, in the order in which they start."""

_MADE: Final[tuple[type[Any], ...]] = (
    PeriodCounts,
    LongestWaits,
    Refusals,
    ServiceHistory,
    SettlementService,
    KeptResponses,
    PromptLogs,
    Responses,
    Authorizer,
    BodyReader,
    Continuations,
    Models,
    RequestReader,
    RequestChecker,
    PromptChunks,
    CacheDiagnostics,
    Repeats,
    RequestSubmitter,
    EarlierResponses,
    ResponseSender,
    StoredCompletions,
    Completions,
    Tokenization,
    ModelList,
    LineRunner,
)
"""Services that are made from those opened before and from each other, in this order."""


@asynccontextmanager
async def open_services(
    settings: Settings, *, on_failure: Callable[[], None]
) -> AsyncIterator[Services]:
    """Open connections and start the background loops; on exit, stop them in reverse order.

    Calls `on_failure` if a bug ends a loop: otherwise the process would stop responding but appear
    healthy.
    """
    telemetry.TENANTS.assign(settings.metrics_tenants)
    async with AsyncExitStack() as stack:
        services = await _open(settings, stack)
        await _start(services, stack, on_failure)
        yield services


async def _open(settings: Settings, stack: AsyncExitStack) -> Services:
    database = Database(settings.database_url.get_secret_value())
    stack.push_async_callback(database.aclose)
    await require_current_schema(database)
    authenticator = Authenticator.from_settings(settings, database)
    redis = connect(settings.redis_url, max_connections=MAX_REDIS_CONNECTIONS)
    stack.push_async_callback(redis.aclose)
    prices = PriceBook(database, batch_percent=settings.batch_price_percent)
    aliases, adapters = AliasBook(database), AdapterBook(database)
    for book in (prices, aliases, adapters):
        await book.refresh()
    lines_released = LinesReleased()
    listener = RevocationListener(
        redis,
        authenticator,
        prices=prices.refresh_soon,
        aliases=aliases.refresh_soon,
        lines=lines_released.set,
        adapters=adapters.refresh_soon,
    )
    listener.start()
    stack.push_async_callback(listener.stop)
    executor = shared_connection(redis)
    stack.push_async_callback(executor.aclose)
    catalogue = Catalogue(executor)
    dispatcher = Dispatcher(
        gateway=await new_gateway(redis),
        client=redis,
        catalogue=catalogue,
        max_waiting_jobs=settings.max_waiting_jobs,
        max_waiting_jobs_of_tenant=settings.max_waiting_jobs_of_tenant,
        queue_timeout_seconds=settings.queue_timeout.total_seconds(),
        resume_after_seconds=settings.resume_after.total_seconds(),
    )
    dispatcher.presence.fingerprints = settings.fingerprints
    # Always accept a single body of the maximum size.
    most_held = max(settings.max_held_bytes_of_tenant, settings.max_body_bytes)
    large_work = LargeWork(most_waiting_bytes=most_held, processes=settings.processes)
    stack.callback(large_work.close)
    segments = SegmentCache(
        most_bytes=settings.prompt_cache_bytes,
        most_bytes_of_tenant=settings.prompt_cache_bytes_of_tenant,
    )
    telemetry.PROMPT_CACHE_BYTES.set_function(lambda: segments.bytes)
    grammars = GrammarChecker(SandboxSettings())
    stack.push_async_callback(grammars.aclose)
    quotas = QuotaStore(executor)
    storage = Storage(executor, most_of_tenant=settings.max_stored_bytes_of_tenant)
    seeder = Seeder(quotas, partial(read_balances, database))
    # A deployment without encryption keys still has this secret.
    salt_secret = settings.cache_salt_secret.get_secret_value()
    services = Services.of(
        settings,
        database,
        executor,
        ChangeAnnouncer(redis),
        lines_released,
        # Requests
        BodyBytes(most_bytes=most_held),
        large_work,
        LoopTurns(),
        UnpaidRequests(settings.unpaid_requests_per_minute),
        FailedLogins(settings.failed_logins_per_minute),
        authenticator,
        # Models
        catalogue,
        adapters,
        aliases,
        TokenizerStore(
            lambda digest: catalogue.file(keys.tokenizer(digest)),
            segments,
            is_fast=settings.fast_tokenizers,
        ),
        ChatTemplates(
            lambda digest: catalogue.file(keys.chat_template(digest)), grammars.try_template
        ),
        grammars,
        ImageFetcher.from_settings(settings),
        AudioDecoder(settings),
        Sealer(settings.plain_encryption_keys() or [salt_secret]),
        # Limits
        prices,
        quotas,
        seeder,
        Reservations(quotas, seeder, dispatcher.gateway, storage),
        storage,
        # Responses
        dispatcher,
    ).with_others(
        {
            Redis: redis,
            CommandExecutor: executor,
            OidcProvider: OidcProvider.from_settings(settings),
        }
    )
    for kind in _MADE:
        services = services.with_others({kind: services.make(kind)})
    return services


async def _start(services: Services, stack: AsyncExitStack, on_failure: Callable[[], None]) -> None:
    dispatcher, reservations = services[Dispatcher], services[Reservations]
    await _announce(services)
    stack.push_async_callback(dispatcher.aclose)
    heartbeat = Heartbeat(
        services[Settings].redis_url, dispatcher.presence, reservations, on_failure=on_failure
    )
    stack.push_async_callback(heartbeat.aclose)
    heartbeat.start()

    def report_failure(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.critical("a background loop failed; the gateway shuts down", exc_info=error)
            on_failure()

    for kind in _LOOPS:
        task = asyncio.create_task(services[kind].run())
        task.add_done_callback(report_failure)
        stack.push_async_callback(end_task, task)
    stack.push_async_callback(services[Refusals].write_faults)
    # Settle the requests that end at shutdown while the loops still run.
    stack.push_async_callback(reservations.aclose)
    stack.push_async_callback(services[SettlementService].aclose)
    stack.push_async_callback(services[Responses].aclose)


async def _announce(services: Services) -> None:
    # Workers drop jobs of a gateway without a heartbeat, so send the first heartbeat before any
    # job.
    try:
        await services[Dispatcher].beat()
        await services[Catalogue].refresh()
    except RedisError as error:
        logger.warning("%s is not reachable yet: %s", describe(services[Redis]), cause_of(error))
