"""A gateway in the test's own process, for routes that need no worker."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import httpx
from fastapi import FastAPI

from gateway.accounts.keys.service import KeyService
from gateway.billing.ledger.store import read_balances
from gateway.http.services import Services
from gateway.limits.seeding import Seeder
from gateway.limits.store import QuotaStore
from gateway.platform.changes import ChangeAnnouncer
from gateway.platform.database.engine import Database
from gateway.platform.redis_client import connect
from gateway.platform.settings import Settings
from gateway.process.app import create_app, create_operator_app
from gateway.process.services import open_services
from gateway.records.scopes import Scope
from tests.support.postgres_server import NOWHERE
from tests.support.processes import free_port


@dataclass
class Management:
    """The gateway, and helpers to prepare and inspect it."""

    app: FastAPI
    operators: FastAPI

    @property
    def services(self) -> Services:
        """The services of the gateway."""
        services: Services = self.app.state.services
        return services

    async def key(self, tenant_id: str, *scopes: Scope, **options: Any) -> str:
        """Return a new key of a tenant."""
        service = KeyService(self.services[Database], self.services[ChangeAnnouncer])
        created = await service.create(tenant_id, name="test", scopes=scopes, **options)
        return created.key.reveal()

    async def call(
        self, key: str, method: str, path: str, body: Any = None, **options: Any
    ) -> httpx.Response:
        """Send a request and return the response."""
        app = self.operators if path.startswith("/admin") else self.app
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        if body is not None:
            options["json"] = body
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            headers = {"authorization": f"Bearer {key}"} | options.pop("headers", {})
            return await client.request(method, path, headers=headers, **options)

    def lose_database(self) -> None:
        """Make every query of the database fail from now on."""
        nowhere = Database(NOWHERE)
        self._replace({Database: nowhere})

    def lose_redis(self) -> None:
        """Make every command to Redis fail from now on."""
        unreachable = connect(f"redis://127.0.0.1:{free_port()}", max_connections=4)
        self._replace(
            {
                ChangeAnnouncer: ChangeAnnouncer(unreachable),
                QuotaStore: QuotaStore(unreachable),
                Seeder: Seeder(QuotaStore(unreachable), partial(read_balances, Database(NOWHERE))),
            }
        )

    def _replace(self, others: Mapping[type[Any], object]) -> None:
        self.app.state.services = self.services.with_others(others)


@cache
def _apps() -> tuple[FastAPI, FastAPI]:
    """Return both applications. Their hundred routes take longer to make than most tests."""
    settings = Settings()
    app = create_app(settings)
    return app, create_operator_app(settings, app)


@asynccontextmanager
async def running_management(settings: Settings) -> AsyncIterator[Management]:
    """Open the gateway without a port; its services are in its context."""
    app, operators = _apps()
    async with open_services(settings, on_failure=app.state.drain.fail) as services:
        app.state.services = services
        yield Management(app, operators)
