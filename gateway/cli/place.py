"""The checks of `sluice check` from the places of gateways, `sluice jobs` and `sluice beat`."""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any, Final

from redis.exceptions import RedisError
from sqlalchemy import func, select, text
from sqlalchemy.exc import DBAPIError

from common import clock
from common.checks import (
    LOCAL,
    TIMEOUT_SECONDS,
    Finding,
    State,
    check_clock,
    check_files,
    check_latency,
    check_redis,
    finding,
)
from common.object_store import NO_STORE
from contract import keys
from contract.tier import ServiceTier
from gateway.auth.jwt_verifier import JwtVerifier
from gateway.auth.oidc import OidcProvider
from gateway.billing.ledger.history import ServiceHistory
from gateway.cli.deployment import Stores, command_settings
from gateway.completions.queue.presence import ALIVE_SECONDS, known_gateways
from gateway.console.operators.health import read_health
from gateway.limits.refusal_log import PeriodCounts
from gateway.models.price_book import PriceBook
from gateway.models.waits import LongestWaits
from gateway.platform.blobs import Blobs
from gateway.platform.database.engine import Database, describe, tls_of
from gateway.platform.database.schema import schema_state, unprotected_tables
from gateway.platform.database.tables import TenantRow, WebhookRow
from gateway.platform.redis_client import converting_errors
from gateway.platform.store_errors import cause_of
from gateway.records.capacity import DAY_SECONDS, MEASURED, MEMORY_FACTOR, RETENTION_SECONDS
from gateway.records.errors import ApiError, StartupError
from gateway.records.times import utc_now

OTHER_DESCRIPTORS: Final = 1024
"""Of a gateway, besides the connections of clients."""
REDIS_CONNECTIONS: Final = 16
OLDEST_POSTGRESQL: Final = 130_000
BUSIEST: Final = 10
"""Requests of the busiest minute over those of a mean one."""
_SERVER: Final = text(
    "SELECT CAST(current_setting('server_version_num') AS int), current_setting('server_version'), "
    "current_setting('transaction_read_only'), pg_backend_pid(), "
    "CAST(extract(epoch FROM clock_timestamp()) AS double precision)"
)


async def _redis(stores: Stores) -> AsyncIterator[Finding]:
    needed = 0.0
    with suppress(
        ApiError, StartupError, DBAPIError
    ):  # The checks of the database and of Redis say why.
        needed = await _needed_bytes(stores)
    url = stores.settings.redis_url
    async for each in check_redis("Redis", url, cause_of, needed_bytes=needed):
        yield each


async def _broker(stores: Stores) -> AsyncIterator[Finding]:
    url = stores.settings.celery_broker_url
    if url is not None and url != stores.settings.redis_url:
        async for each in check_redis("broker", url, cause_of):
            yield each
    from gateway.jobs.app import create_app

    create_app(stores.settings)


async def _needed_bytes(stores: Stores) -> float:
    """Return `maxmemory` for the load of the last day: the formula of docs/capacity.md."""
    with converting_errors(stores.redis):
        await stores.catalogue.refresh()
    async with stores.database.reading() as transaction:
        tenants = await transaction.scalar(select(func.count()).select_from(TenantRow)) or 0
    served = (await ServiceHistory(stores.database).get()).last_day.requests
    rate = BUSIEST * served / DAY_SECONDS
    running = sum(model.card.max_sequences for model in stores.catalogue.models)
    counts = {
        "redis_running": running,
        "redis_ended": rate * RETENTION_SECONDS,
        "redis_waiting": stores.settings.max_waiting_jobs,
        "redis_tenant": tenants,
    }
    need = sum(MEASURED[name] * count for name, count in counts.items())
    return MEMORY_FACTOR * need


async def _database(stores: Stores) -> AsyncIterator[Finding]:
    database = stores.database
    where = describe(database.engine.url)
    state = await schema_state(database)
    is_usable, remedy = state.is_usable, "Run `sluice db upgrade`."
    found = f"{where}: {state.value}"
    yield finding("database schema", found, (not is_usable, State.ERROR, remedy))
    if is_usable:
        async with database.reading() as transaction:
            bare = await unprotected_tables(transaction)
        remedy = "Compare these tables with a backup: triggers that reject changes are missing."
        found = ", ".join(bare) or "append-only"
        yield finding("database triggers", found, (bool(bare), State.ERROR, remedy))
    if database.engine.dialect.name == "postgresql":
        async for each in _postgresql(stores):
            yield each


async def _postgresql(stores: Stores) -> AsyncIterator[Finding]:
    seconds: list[float] = []
    async with Database.reading(stores.database) as transaction:
        connection = await transaction.connection()
        for _ in range(5):
            began = time.perf_counter()
            row: Any = (await connection.execute(_SERVER)).one()
            seconds.append(time.perf_counter() - began)
        number, version, read_only, pid, at = row
        ahead = at - clock.now_ms() / 1000 + seconds[-1] / 2
        driver: Any = (await connection.get_raw_connection()).driver_connection
        tls = tls_of(driver)
        is_pooled = driver.get_server_pid() != pid
    yield finding(
        "database version",
        version,
        (number < OLDEST_POSTGRESQL, State.ERROR, "Install PostgreSQL 13 or later."),
        (read_only == "on", State.ERROR, "Name the primary, or target_session_attrs=read-write."),
    )
    yield Finding("database pooler", State.OK, "a pooler" if is_pooled else "none")
    is_verified = tls is not None and tls.context.verify_mode.name == "CERT_REQUIRED"
    yield finding(
        "database TLS",
        "verified" if is_verified else "not encrypted" if tls is None else "not verified",
        (
            not is_verified and stores.database.engine.url.host not in LOCAL,
            State.WARNING,
            "Set sslmode=verify-full and sslrootcert=FILE in SLUICE_DATABASE_URL.",
        ),
    )
    yield check_latency("database latency", seconds)
    yield check_clock("database clock", ahead)


async def _store(stores: Stores) -> AsyncIterator[Finding]:
    folder = stores.settings.file_store
    if folder == NO_STORE:
        yield Finding("file store", State.OK, "none: no batches, files and adapters")
        return
    blobs, key, content = Blobs(folder), f"check-{secrets.token_hex(8)}", secrets.token_bytes(16)
    await blobs.put(key, content)
    is_same = await blobs.read(key) == content
    await blobs.delete([key])
    remedy = "The store returns other bytes than were written: replace it."
    yield finding("file store", folder, (not is_same, State.ERROR, remedy))


async def _files(stores: Stores) -> AsyncIterator[Finding]:
    yield check_files(stores.settings.max_connections + OTHER_DESCRIPTORS)


async def _identity(stores: Stores) -> AsyncIterator[Finding]:
    settings = stores.settings
    if (verifier := JwtVerifier.from_settings(settings)) is not None:
        await verifier.require_keys()
        yield Finding("JWT keys", State.OK, f"of {settings.jwt_issuer}")
    if (provider := OidcProvider.from_settings(settings)) is not None:
        await provider.require_keys()
        yield Finding("OpenID provider", State.OK, provider.issuer)


async def _secrets(stores: Stores) -> AsyncIterator[Finding]:
    redis, oldest_ms = stores.redis, clock.now_ms() - 1000 * ALIVE_SECONDS
    alive = [name for name, at_ms in (await known_gateways(redis)).items() if at_ms > oldest_ms]
    own = stores.settings.fingerprints
    every = [own] if stores.settings.cache_salt_secret.get_secret_value() else []
    for name in alive:
        value: Any = await redis.get(keys.gateway_alive(name))
        if value:
            every.append(value.decode())
    shared = set.intersection(*(set(each.split()) for each in every)) if every else set[str]()
    different = {pair.partition("=")[0] for each in every for pair in each.split()} - {
        pair.partition("=")[0] for pair in shared
    }
    yield finding(
        "secrets",
        f"differ: {', '.join(sorted(different))}" if different else f"of {len(alive)} gateways",
        (bool(different), State.ERROR, "Set each to the same value on all gateways."),
        (not alive, State.WARNING, "No gateway has a heartbeat: start one."),
        (own not in every, State.WARNING, "Run this in the place of a gateway: it has no secrets."),
    )


async def _models(stores: Stores) -> AsyncIterator[Finding]:
    with converting_errors(stores.redis):
        await stores.catalogue.refresh()
    prices = PriceBook(stores.database, batch_percent=stores.settings.batch_price_percent)
    await prices.refresh()
    names = sorted(stores.catalogue.names)
    free = [each for each in names if prices.find(each, ServiceTier.DEFAULT, utc_now()) is None]
    found = f"missing for {', '.join(free)}" if free else f"of {len(names)} models"
    remedy = f"sluice prices add {free[0] if free else 'MODEL'} --prompt 0.15 --completion 0.60"
    yield finding("prices", found, (bool(free), State.WARNING, f"{remedy}; else it is free."))
    for name in names:
        for card in [each.card for each in await stores.catalogue.workers(name)]:
            if problem := card.last_failure or card.inexact:
                remedy = "Read the worker's log; `sluice check --role worker` on its machine."
                yield Finding(f"worker {card.id}", State.WARNING, problem, remedy)


async def _webhooks(stores: Stores) -> AsyncIterator[Finding]:
    query = select(func.count()).select_from(WebhookRow).where(WebhookRow.removed_at.is_(None))
    async with stores.database.reading() as transaction:
        count = await transaction.scalar(query) or 0
    is_bare = bool(count) and not stores.settings.encryption_keys
    remedy = "Set SLUICE_ENCRYPTION_KEYS as on the gateways: without it nothing is sent."
    yield finding("webhooks", str(count), (is_bare, State.ERROR, remedy))
    sinks = ", ".join(sink.name for sink in stores.settings.export_sinks) or "none"
    yield Finding("export sinks", State.OK, sinks)


async def _deployment(stores: Stores) -> AsyncIterator[Finding]:
    services = stores.services()
    with converting_errors(stores.redis):
        await stores.catalogue.refresh()
        for kind in (ServiceHistory, PeriodCounts, LongestWaits):
            services = services.with_others({kind: services.make(kind)})
        problems = (await read_health(services)).problems
    for problem in problems:
        remedy = "Follow the runbook of the alert in parentheses: ops/README.md."
        yield Finding("deployment", State.WARNING, problem.text, remedy)
    if not problems:
        yield Finding("deployment", State.OK, "no alert would be raised")


CHECKS: Final[tuple[tuple[str, Callable[[Stores], AsyncIterator[Finding]], str], ...]] = (
    ("Redis", _redis, "gateway jobs beat"),
    ("broker", _broker, "jobs beat"),
    ("database", _database, "gateway jobs"),
    ("file store", _store, "gateway jobs"),
    ("open files", _files, "gateway"),
    ("identity", _identity, "gateway"),
    ("secrets", _secrets, "gateway"),
    ("models", _models, "gateway"),
    ("webhooks", _webhooks, "jobs"),
    ("deployment", _deployment, "gateway"),
)
"""Each check by the name of its findings if it fails, and the roles from whose place it looks."""


async def findings_of(role: str, **urls: str | None) -> list[Finding]:
    """Return what the checks of a role find. A check that fails is an error."""
    stores = Stores(command_settings(**urls), max_connections=REDIS_CONNECTIONS)
    found: list[Finding] = []
    try:
        for name, run, roles in CHECKS:
            if role not in roles.split():
                continue
            try:
                async with asyncio.timeout(6 * TIMEOUT_SECONDS):
                    async for each in run(stores):
                        found.append(each)  # noqa: PERF401 - keep those before an error
            except (ApiError, StartupError) as error:
                found.append(Finding(name, State.ERROR, str(error)))
            except (RedisError, DBAPIError, OSError) as error:
                found.append(Finding(name, State.ERROR, cause_of(error)))
    finally:
        await stores.aclose()
    return found
