"""Tenant lifecycle: create, change, suspend and activate."""

import math
import re
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, Final

from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession
from typing_extensions import Unpack

from gateway.database.engine import Database
from gateway.database.paging import Page, PageRequest
from gateway.errors import ConflictError, InvalidParameterError, NotFoundError, must, shown
from gateway.management.audit.log import SYSTEM, AuditLog
from gateway.management.tenants.store import TenantStore
from gateway.origins import read_origins
from gateway.tenancy.changes import ChangeAnnouncer
from gateway.tenancy.checks import check_known, check_name, check_not_empty
from gateway.tenancy.limits import changed_limits
from gateway.tenancy.records import Tenant, TenantChanges, TenantOptions, TenantStatus
from gateway.tenancy.times import utc_now

MIN_WEIGHT: Final = 0.001
MAX_WEIGHT: Final = 1000.0
STRIPE_CUSTOMER: Final = r"^[A-Za-z0-9_]{1,255}$"

_TENANT_ID = re.compile(r"[a-z0-9-]{1,63}")
_ACTIONS: Final = {
    TenantStatus.SUSPENDED: "tenant.suspend",
    TenantStatus.ACTIVE: "tenant.activate",
}


class TenantService:
    """Creates tenants and controls whether they are served.

    Every change is audited under the name of its `actor`.
    """

    def __init__(self, database: Database, announcer: ChangeAnnouncer) -> None:
        self._database = database
        self._announcer = announcer

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
            _check_id(tenant_id)
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
        try:
            async with self._database.writing() as transaction:
                store = TenantStore(transaction)
                await _check_plan(store, options)
                await store.add(tenant)
                await AuditLog(transaction).append(
                    "tenant.create", tenant.id, actor=actor, tenant_id=tenant.id, details=columns
                )
        except IntegrityError as error:
            raise ConflictError(f"The tenant {shown(tenant.id)} already exists.") from error
        if tenant.cors_origins:
            # Gateways cache the origins of all tenants.
            await self._announcer.tenant_changed(tenant.id)
        return tenant

    async def list_all(self) -> list[Tenant]:
        """Return all tenants, oldest first."""
        async with self._database.reading() as transaction:
            return await TenantStore(transaction).list_all()

    async def page(self, wanted: PageRequest, *, text: str = "") -> Page[Tenant]:
        """Return a page of all tenants, or of those whose id or name contains a text."""
        async with self._database.reading() as transaction:
            return await TenantStore(transaction).page(wanted, text=text)

    async def prepaid(self, *, limit: int) -> list[Tenant]:
        """Return prepaid tenants, newest first."""
        async with self._database.reading() as transaction:
            return await TenantStore(transaction).prepaid(limit=limit)

    async def get(self, tenant_id: str) -> Tenant:
        """Return the tenant."""
        check_known(tenant_id, "tenant")
        async with self._database.reading() as transaction:
            tenant = await TenantStore(transaction).get(tenant_id)
        return found_tenant(tenant, tenant_id)

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
        async with self._database.writing() as transaction:
            store = TenantStore(transaction)
            tenant = found_tenant(await store.lock(tenant_id), tenant_id)
            await _check_plan(store, options)
            columns: dict[str, Any] = {**options}
            if "limits" in options:
                columns["limits"] = changed_limits(tenant.limits, options["limits"])
            await store.change(tenant_id, columns)
            await AuditLog(transaction).append(
                "tenant.update", tenant_id, actor=actor, tenant_id=tenant_id, details=options
            )
        await self._announcer.tenant_changed(tenant_id)
        return replace(tenant, **columns)

    async def _set_status(self, tenant_id: str, status: TenantStatus, actor: str) -> Tenant:
        """Change the status; a repeated call announces it again."""
        check_known(tenant_id, "tenant")
        async with self._database.writing() as transaction:
            store = TenantStore(transaction)
            tenant = found_tenant(await store.lock(tenant_id), tenant_id)
            if tenant.status is not status:
                await store.change(tenant_id, {"status": status})
                await AuditLog(transaction).append(
                    _ACTIONS[status], tenant_id, actor=actor, tenant_id=tenant_id
                )
        await self._announcer.tenant_changed(tenant_id)
        return replace(tenant, status=status)


@asynccontextmanager
async def reading_of_tenant(database: Database, tenant_id: str) -> AsyncIterator[AsyncSession]:
    """Open a read transaction for data of the tenant. Raises NotFoundError."""
    check_known(tenant_id, "tenant")
    async with database.reading() as transaction:
        found_tenant(await TenantStore(transaction).get(tenant_id), tenant_id)
        yield transaction


def found_tenant(tenant: Tenant | None, tenant_id: str) -> Tenant:
    """Return the tenant. Raises NotFoundError if it is None."""
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
    if "cors_origins" not in options:
        return options
    try:
        return {**options, "cors_origins": read_origins(options["cors_origins"])}
    except ValueError as error:
        raise InvalidParameterError(f"'cors_origins' {error}", param="cors_origins") from None


async def _check_plan(store: TenantStore, options: TenantOptions | TenantChanges) -> None:
    plan_id = options.get("plan_id")
    if plan_id is None:
        return
    check_name(plan_id, param="plan_id")
    if not await store.has_plan(plan_id):
        raise must("plan_id", "be the id of a plan", plan_id)


def _check_weight(weight: float) -> None:
    if not (math.isfinite(weight) and MIN_WEIGHT <= weight <= MAX_WEIGHT):
        raise InvalidParameterError(
            f"'weight' must be a number from {MIN_WEIGHT} to {MAX_WEIGHT:g}. Given: {weight}.",
            param="weight",
        )


def _check_id(tenant_id: str) -> None:
    if _TENANT_ID.fullmatch(tenant_id) is None:
        raise must("id", "have 1 to 63 characters from a-z, 0-9 and '-'", tenant_id)
