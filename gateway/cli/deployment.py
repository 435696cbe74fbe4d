"""The deployment that a command manages without a gateway: its database and its Redis.

`serving` serves the Admin API in this process, so that the commands work in the same way before the
first gateway runs. Its principal is the user of this machine, who needs no key.
"""

import getpass
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from functools import partial
from importlib import import_module
from typing import Any, NoReturn

import click
import httpx
from fastapi import APIRouter, FastAPI, Request
from redis.asyncio import Redis
from redis.exceptions import RedisError
from typing_extensions import override

from contract.scripts import CommandExecutor
from gateway.accounts.routes_common import TenantRouter
from gateway.auth.authenticator import Authenticator
from gateway.billing.ledger.store import read_balances
from gateway.cli.client import HEADERS, AdminClient
from gateway.cli.terminal import URL_SOURCE
from gateway.http.allowances import BodyBytes, FailedLogins, UnpaidRequests
from gateway.http.authorization import Authorizer
from gateway.http.body import BodyReader
from gateway.http.error_handlers import install_error_handlers
from gateway.http.services import Services
from gateway.limits.seeding import Seeder
from gateway.limits.store import QuotaStore
from gateway.models.catalogue import Catalogue
from gateway.platform.changes import ChangeAnnouncer
from gateway.platform.concurrency.fair_turns import LoopTurns
from gateway.platform.concurrency.large_work import LargeWork
from gateway.platform.database.engine import Database
from gateway.platform.database.schema import CheckedDatabase
from gateway.platform.redis_client import connect, converting_errors, shared_connection
from gateway.platform.settings import Settings, load_command_settings
from gateway.records.errors import StoreUnavailableError
from gateway.records.principal import Principal
from gateway.records.scopes import Scope


def command_settings(**given: str | None) -> Settings:
    """Return the settings of a command that manages a deployment; see `load_command_settings`."""
    settings, file = load_command_settings(**given)
    click.get_current_context().meta[URL_SOURCE] = file
    return settings


class Stores:
    """Resources of the management commands."""

    def __init__(self, settings: Settings, *, max_connections: int = 2) -> None:
        self.settings = settings
        self.database = CheckedDatabase(settings.database_url.get_secret_value())
        # One for the commands of the shared connection.
        self.redis = connect(settings.redis_url, max_connections=max_connections)
        self.executor = shared_connection(self.redis)
        self.announcer = ChangeAnnouncer(self.redis)
        self.catalogue = Catalogue(self.executor)
        self.seeder = Seeder(QuotaStore(self.executor), partial(read_balances, self.database))
        self.authenticator = user = _User()
        self.loop_turns = turns = LoopTurns()
        most_bytes = settings.max_body_bytes
        self.authorizer = Authorizer(settings, user, FailedLogins(0), turns)
        self.bodies = BodyReader(
            settings,
            self.catalogue,
            BodyBytes(most_bytes=most_bytes),
            LargeWork(most_waiting_bytes=most_bytes),
            turns,
            UnpaidRequests(0),
        )

    def services(self) -> Services:
        """Return the services that the routes of the Admin API use."""
        return Services.of(*vars(self).values()).with_others(
            {
                Database: self.database,
                Redis: self.redis,
                CommandExecutor: self.executor,
                Authenticator: self.authenticator,
            }
        )

    async def aclose(self) -> None:
        """Close all connections."""
        await self.executor.aclose()
        await self.redis.aclose()
        await self.database.aclose()


class _User(Authenticator):
    """Authenticates every request as the user of the command line."""

    def __init__(self) -> None:
        self.principal = Principal(
            tenant_id="",
            tenant_weight=1.0,
            credential_id=f"cli:{getpass.getuser()}",
            scopes=frozenset({Scope.ADMIN}),
            allowed_models=None,
        )

    @override
    async def authenticate(
        self, authorization: str | None, *, address: str | None = None
    ) -> Principal:
        return self.principal


@asynccontextmanager
async def open_stores(database_url: str | None, redis_url: str | None) -> AsyncIterator[Stores]:
    """Open the database and Redis from the options, the environment or a running `sluice up`.

    Within the block, errors of Redis are StoreUnavailableError.
    """
    stores = Stores(command_settings(database_url=database_url, redis_url=redis_url))
    try:
        with converting_errors(stores.redis):
            yield stores
    finally:
        await stores.aclose()


@asynccontextmanager
async def serving(
    routers: Iterable[str], database_url: str | None, redis_url: str | None
) -> AsyncIterator[AdminClient]:
    """Open a client of the Admin API in this process, with only the routes of these modules."""
    async with open_stores(database_url, redis_url) as stores:
        app = FastAPI(openapi_url=None)
        app.state.services = stores.services()
        install_error_handlers(app)
        for error in (StoreUnavailableError, RedisError):
            # The user of the command line reads the address and the cause, unlike clients.
            app.add_exception_handler(error, _raise)
        for name in routers:
            app.include_router(_operators_router(name))
        headers = {**HEADERS, "Authorization": "Bearer -"}
        served: Any = {"transport": httpx.ASGITransport(app), "base_url": "http://sluice"}
        async with httpx.AsyncClient(**served, headers=headers) as http:
            yield AdminClient(http, "The Admin API", stores)


def _operators_router(name: str) -> APIRouter:
    """Return the operators' routes of a module."""
    module = import_module(name)
    router: APIRouter = getattr(module, "operators", None) or module.router
    return router.operators if isinstance(router, TenantRouter) else router


async def _raise(_request: Request, error: Exception) -> NoReturn:
    raise error
