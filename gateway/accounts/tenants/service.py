"""Tenant lifecycle: create, change, suspend and activate."""

import math
import re
import secrets
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from typing import Any, Final, Unpack
from zoneinfo import available_timezones

from sqlalchemy import or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from gateway.accounts.audit.log import SYSTEM
from gateway.accounts.changes import Service, changing
from gateway.accounts.plans.spending import apply_plans
from gateway.platform.database.engine import Database
from gateway.platform.database.paging import Page, PageRequest, find_record, read_page
from gateway.platform.database.tables import PlanRow, TenantRow
from gateway.records.checks import (
    check_known,
    check_name,
    check_new_id,
    check_not_empty,
    read_origins,
)
from gateway.records.errors import InvalidParameterError, NotFoundError, must, shown
from gateway.records.limits import changed_limits
from gateway.records.records import Billing, Tenant, TenantChanges, TenantOptions, TenantStatus
from gateway.records.times import utc_now

MIN_WEIGHT: Final = 0.001
MAX_WEIGHT: Final = 1000.0
STRIPE_CUSTOMER: Final = r"^[A-Za-z0-9_]{1,255}$"

_ACTIONS: Final = {
    TenantStatus.SUSPENDED: "tenant.suspend",
    TenantStatus.ACTIVE: "tenant.activate",
}


class TenantService(Service):
    """Creates tenants and controls whether they are served.

    Every change is audited under the name of its `actor`.
    """

    async def create(
        self,
        name: str,
        *,
        tenant_id: str | None = None,
        weight: float = 1.0,
        actor: str = SYSTEM,
        **options: Unpack[TenantOptions],
    ) -> Tenant:
        """Create an active tenant; without an id it gets a random one that starts with `tnt_`."""
        if tenant_id is not None:
            check_new_id(tenant_id)
        given = _checked(TenantChanges(name=name, weight=weight, **options))
        columns: dict[str, Any] = {
            **given,
            "limits": changed_limits({}, options.get("limits", {})),
        }
        tenant = Tenant(
            id=tenant_id or f"tnt_{secrets.token_hex(8)}",
            status=TenantStatus.ACTIVE,
            created_at=utc_now(),
            **columns,
        )
        conflict = f"The tenant {shown(tenant.id)} already exists."
        async with changing(self._database, tenant.id, actor=actor, conflict=conflict) as change:
            await _check_plan(change.transaction, options)
            await change.insert(TenantRow(**asdict(tenant)))
            if tenant.plan_id is not None:
                await apply_plans(change.transaction, TenantRow.id == tenant.id)
            await change.audit("tenant.create", tenant.id, columns)
            if tenant.cors_origins:
                # Gateways cache the origins of all tenants.
                change.announce(self._announcer.tenant_changed, tenant.id)
        return tenant

    async def page(self, wanted: PageRequest, *, text: str = "") -> Page[Tenant]:
        """Return a page of all tenants, or of those whose id or name contains a text."""
        found = or_(
            TenantRow.id.icontains(text, autoescape=True),
            TenantRow.name.icontains(text, autoescape=True),
        )
        async with self._database.reading() as transaction:
            return await read_page(transaction, TenantRow, wanted, *([found] if text else []))

    async def names(self, ids: Collection[str]) -> dict[str, str]:
        """Return the names of those of these tenants that exist."""
        named = select(TenantRow.id, TenantRow.name).where(TenantRow.id.in_(ids))
        async with self._database.reading() as transaction:
            return {row.id: row.name for row in await transaction.execute(named)}

    async def prepaid(self, *, limit: int) -> list[Tenant]:
        """Return prepaid tenants, newest first."""
        query = select(TenantRow).where(TenantRow.billing == Billing.PREPAID)
        newest = query.order_by(TenantRow.created_at.desc(), TenantRow.id.desc()).limit(limit)
        async with self._database.reading() as transaction:
            return [row.to_record() for row in await transaction.scalars(newest)]

    async def get(self, tenant_id: str) -> Tenant:
        """Return the tenant."""
        async with self._database.reading() as transaction:
            return await find_tenant(transaction, tenant_id)

    async def suspend(self, tenant_id: str, *, actor: str = SYSTEM) -> Tenant:
        """Suspend the tenant: every gateway rejects its requests from now on."""
        return await self._set_status(tenant_id, TenantStatus.SUSPENDED, actor)

    async def activate(self, tenant_id: str, *, actor: str = SYSTEM) -> Tenant:
        """Activate a suspended tenant."""
        return await self._set_status(tenant_id, TenantStatus.ACTIVE, actor)

    async def update(
        self, tenant_id: str, *, actor: str = SYSTEM, **options: Unpack[TenantChanges]
    ) -> Tenant:
        """Change the given options on every gateway; of `limits`, only those it contains."""
        check_known(tenant_id, "tenant")
        check_not_empty(options)
        options = _checked(options)
        async with changing(self._database, tenant_id, actor=actor) as change:
            tenant = await find_tenant(change.transaction, tenant_id, is_locked=True)
            await _check_plan(change.transaction, options)
            columns: dict[str, Any] = {**options}
            if "limits" in options:
                columns["limits"] = changed_limits(tenant.limits, options["limits"])
            await change.set(TenantRow, TenantRow.id == tenant_id, columns)
            if "plan_id" in options:
                await apply_plans(change.transaction, TenantRow.id == tenant_id)
            await change.audit("tenant.update", tenant_id, options)
            change.announce(self._announcer.tenant_changed, tenant_id)
        return replace(tenant, **columns)

    async def _set_status(self, tenant_id: str, status: TenantStatus, actor: str) -> Tenant:
        """Change the status; a repeated call announces it again."""
        async with changing(self._database, tenant_id, actor=actor) as change:
            tenant = await find_tenant(change.transaction, tenant_id, is_locked=True)
            if tenant.status is not status:
                await change.set(TenantRow, TenantRow.id == tenant_id, {"status": status})
                await change.audit(_ACTIONS[status], tenant_id)
            change.announce(self._announcer.tenant_changed, tenant_id)
        return replace(tenant, status=status)


@asynccontextmanager
async def reading_of_tenant(database: Database, tenant_id: str) -> AsyncIterator[AsyncSession]:
    """Open a read transaction for data of the tenant. Raises NotFoundError."""
    async with database.reading() as transaction:
        await find_tenant(transaction, tenant_id)
        yield transaction


async def find_tenant(
    transaction: AsyncSession, tenant_id: str, *, is_locked: bool = False
) -> Tenant:
    """Return the tenant. Raises NotFoundError."""
    check_known(tenant_id, "tenant")
    is_its = TenantRow.id == tenant_id
    tenant = await find_record(transaction, TenantRow, is_its, is_locked=is_locked)
    if tenant is None:
        raise NotFoundError(f"There is no tenant {shown(tenant_id)}.")
    return tenant


def _checked(options: TenantChanges) -> TenantChanges:
    """Return the options with normalized origins. Raises InvalidParameterError."""
    if "name" in options:
        check_name(options["name"])
    if "weight" in options:
        _check_weight(options["weight"])
    model = options.get("default_model")
    if model is not None:
        check_name(model, param="default_model")
    customer = options.get("stripe_customer_id")
    if customer is not None and re.fullmatch(STRIPE_CUSTOMER, customer) is None:
        raise must("stripe_customer_id", "have 1 to 255 letters, digits and '_'", customer)
    zone = options.get("time_zone", "UTC")
    if zone not in available_timezones():
        raise must("time_zone", "be an IANA name such as 'Europe/Paris'", zone)
    if "cors_origins" not in options:
        return options
    try:
        return {**options, "cors_origins": read_origins(options["cors_origins"])}
    except ValueError as error:
        raise InvalidParameterError(f"'cors_origins' {error}", param="cors_origins") from None


async def _check_plan(transaction: AsyncSession, options: TenantOptions | TenantChanges) -> None:
    plan_id = options.get("plan_id")
    if plan_id is None:
        return
    check_name(plan_id, param="plan_id")
    # Locked: a change of the plan's spend limits applies to the tenants that it sees.
    if await transaction.get(PlanRow, plan_id, with_for_update=True) is None:
        raise must("plan_id", "be the id of a plan", plan_id)


def _check_weight(weight: float) -> None:
    if not (math.isfinite(weight) and MIN_WEIGHT <= weight <= MAX_WEIGHT):
        raise InvalidParameterError(
            f"'weight' must be a number from {MIN_WEIGHT} to {MAX_WEIGHT:g}. Given: {weight}.",
            param="weight",
        )
