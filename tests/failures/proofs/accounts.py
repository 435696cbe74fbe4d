"""Makes tenants, projects, keys, prices and credits, as an operator does."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from redis.asyncio import Redis

from common.redis_url import redis_client
from gateway.accounts.keys.service import KeyService
from gateway.accounts.members import MemberService
from gateway.accounts.plans.service import PlanService
from gateway.accounts.projects.service import ProjectService
from gateway.accounts.spend_limits import SpendLimitService
from gateway.accounts.tenants.service import TenantService
from gateway.accounts.webhooks.service import WebhookService
from gateway.billing.anomalies import learn_limits
from gateway.billing.credits.service import CreditService
from gateway.billing.ledger.store import read_balances
from gateway.billing.prices import PriceService
from gateway.limits.seeding import Seeder
from gateway.limits.store import QuotaStore
from gateway.platform.changes import ChangeAnnouncer
from gateway.platform.database.engine import Database
from gateway.platform.database.holders import spend_limits_of
from gateway.platform.database.tables import SpendLimitRow
from gateway.records.limits import JWT_PREFIX, LimitName, LimitScope, SpendScope, Window
from gateway.records.scopes import TENANT_SCOPES, Role
from gateway.records.spending import LAST_START, SpendLimit
from gateway.records.times import utc_now
from tests.failures.proofs.client import request
from tests.support.secret_box import BOX
from tests.support.stack import MODEL, Stack


@dataclass(frozen=True, slots=True)
class Credential:
    """A key, and the owner of the limits that its requests meet."""

    tenant: str
    project: str | None
    id: str
    text: str


class Accounts:
    """Changes the accounts of a stack."""

    def __init__(self, stack: Stack, database: Database, redis: "Redis") -> None:
        announcer = ChangeAnnouncer(redis)
        self.tenants = TenantService(database, announcer)
        self.projects = ProjectService(database, announcer)
        self.members = MemberService(database, announcer)
        self.keys = KeyService(database, announcer)
        self.plans = PlanService(database, announcer)
        self.prices = PriceService(database, announcer)
        self.credits = CreditService(database, announcer)
        self._database, self._announcer = database, announcer
        seeder = Seeder(QuotaStore(redis), partial(read_balances, database))
        self.spend_limits = SpendLimitService(database, announcer, seeder)
        self.webhooks = WebhookService(database, BOX, allows_private=True)
        self._stack = stack

    async def tenant(
        self, tenant: str, *, limits: dict[str, int] | None = None, **options: Any
    ) -> str:
        """Add a tenant and return its id."""
        await self.tenants.create(tenant, tenant_id=tenant, limits=named(limits), **options)
        return tenant

    async def project(self, tenant: str, *, limits: dict[str, int] | None = None) -> str:
        """Add a project and return its id."""
        return (await self.projects.create(tenant, name="proof", limits=named(limits))).id

    async def key(
        self, tenant: str, project: str | None = None, *, limits: dict[str, int] | None = None
    ) -> Credential:
        """Add a key with all permissions that a tenant's key can have."""
        created = await self.keys.create(
            tenant,
            name="proof",
            project_id=project,
            scopes=frozenset(TENANT_SCOPES),
            limits=named(limits),
        )
        text = created.key.reveal()
        self._stack.note_key(text)
        return Credential(tenant, project, created.record.id, text)

    async def member(self, tenant: str, token: str) -> Credential:
        """Add the person `ada`, who sends requests with this JWT."""
        await self.members.add(tenant, subject="ada", role=Role.DEVELOPER)
        return Credential(tenant, None, f"{JWT_PREFIX}ada", token)

    async def holder(
        self, scope: LimitScope, name: str, limits: dict[str, int], **options: Any
    ) -> Credential:
        """Add a tenant, a project and a key; the one that `scope` names has limits."""
        of = {each: limits if each is scope else None for each in LimitScope}
        tenant = await self.tenant(name, limits=of[LimitScope.TENANT], **options)
        project = await self.project(tenant, limits=of[LimitScope.PROJECT])
        return await self.key(tenant, project, limits=of[LimitScope.KEY])

    async def limit_spending(self, key: Credential, scope: SpendScope, micros: int) -> SpendLimit:
        """Add a monthly spend limit for the model."""
        holder = {
            SpendScope.KEY: key.id,
            SpendScope.PROJECT: key.project,
            SpendScope.MEMBER: key.id.removeprefix(JWT_PREFIX),
        }.get(scope)
        # Tests take minutes: the window does not end meanwhile.
        return await self.spend_limits.add(
            key.tenant,
            scope=scope,
            holder=holder,
            model=MODEL,
            window=Window.MONTH,
            starts_on=1 + (utc_now().day + 13) % LAST_START,
            amount_micros=micros,
        )

    async def learn_limits(self) -> None:
        """Set the automatic spend limits, as a job does every five minutes."""
        await learn_limits(self._database, self._announcer, utc_now())

    async def spend_limits_of(self, key: Credential) -> list[SpendLimit]:
        """Return the spend limits of the key's tenant."""
        async with self._database.reading() as transaction:
            return await spend_limits_of(transaction, SpendLimitRow.tenant_id == key.tenant)

    async def limits(self, url: str, key: Credential) -> dict[str, Any]:
        """Return the limits that a gateway shows for a key; those of the tenant only to a key of
        the tenant.
        """
        of_tenant = await self.key(key.tenant)
        whole: dict[str, Any] = (await request(url, of_tenant.text, path="/v1/limits")).json
        own = (await request(url, key.text, path="/v1/limits")).json
        scopes = {each["scope"]: each for each in (*whole["scopes"], *own["scopes"])}
        return whole | {"scopes": [scopes[scope] for scope in LimitScope if scope in scopes]}

    async def price(self, *, prompt: int, completion: int, cached: int | None = None) -> None:
        """Set the price of the model from now on, in micro-dollars per million tokens."""
        await self.prices.add(
            MODEL, prompt_micros=prompt, completion_micros=completion, cached_micros=cached
        )

    async def grant(self, tenant: str, micros: int) -> None:
        """Give a tenant prepaid credit."""
        await self.credits.grant(tenant, micros, note="proof")


def named(limits: dict[str, int] | None) -> dict[LimitName, int | None]:
    """Return limits by name."""
    return {LimitName(name): value for name, value in (limits or {}).items()}


@asynccontextmanager
async def open_accounts(stack: Stack) -> AsyncIterator[Accounts]:
    """Open the accounts of a stack for the length of a block."""
    database, redis = Database(stack.database_url), redis_client(stack.redis.url)
    try:
        yield Accounts(stack, database, redis)
    finally:
        await redis.aclose()
        await database.aclose()
