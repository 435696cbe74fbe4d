"""The rules of a tenant's life."""

import math
import re
import secrets
from collections.abc import Mapping
from typing import Final

from sqlalchemy.exc import IntegrityError
from typing_extensions import Unpack

from gateway.accounts.changes import ChangeAnnouncer
from gateway.accounts.database import Database
from gateway.accounts.records import Tenant, TenantChanges, TenantOptions, TenantStatus
from gateway.accounts.tenant_store import TenantStore
from gateway.accounts.times import utc_now
from gateway.errors import ConflictError, InvalidParameterError, NotFoundError, shown

MIN_WEIGHT: Final = 0.001
MAX_WEIGHT: Final = 1000.0
MAX_NAME_CHARACTERS: Final = 200

_TENANT_ID = re.compile(r"[a-z0-9-]{1,63}")


class TenantService:
    """Creates tenants and decides whether they are served."""

    def __init__(self, database: Database, announcer: ChangeAnnouncer) -> None:
        self._database = database
        self._announcer = announcer

    async def create(
        self,
        name: str,
        *,
        tenant_id: str | None = None,
        weight: float = 1.0,
        **options: Unpack[TenantOptions],
    ) -> Tenant:
        """Add an active tenant; without an id it gets a random one that begins with `tnt_`."""
        check_name(name)
        _check_weight(weight)
        if tenant_id is not None:
            _check_id(tenant_id)
        _check_options(options)
        tenant = Tenant(
            id=tenant_id or f"tnt_{secrets.token_hex(8)}",
            name=name,
            weight=weight,
            status=TenantStatus.ACTIVE,
            created_at=utc_now(),
            **options,
        )
        try:
            async with self._database.writing() as transaction:
                await TenantStore(transaction).add(tenant)
        except IntegrityError as error:
            raise ConflictError(f"The tenant {shown(tenant.id)} exists already.") from error
        return tenant

    async def list_all(self) -> list[Tenant]:
        """Return all tenants, oldest first."""
        async with self._database.reading() as transaction:
            return await TenantStore(transaction).list_all()

    async def get(self, tenant_id: str) -> Tenant:
        """Return the tenant."""
        async with self._database.reading() as transaction:
            tenant = await TenantStore(transaction).get(tenant_id)
        return _found(tenant, tenant_id)

    async def suspend(self, tenant_id: str) -> Tenant:
        """Refuse the tenant's requests from now on, on every gateway."""
        return await self._set_status(tenant_id, TenantStatus.SUSPENDED)

    async def activate(self, tenant_id: str) -> Tenant:
        """Serve a suspended tenant again."""
        return await self._set_status(tenant_id, TenantStatus.ACTIVE)

    async def update(self, tenant_id: str, **options: Unpack[TenantChanges]) -> Tenant:
        """Change the options that are given, on every gateway."""
        check_not_empty(options)
        _check_options(options)
        async with self._database.writing() as transaction:
            store = TenantStore(transaction)
            await store.set_options(tenant_id, options)
            tenant = _found(await store.get(tenant_id), tenant_id)
        await self._announcer.tenant_changed(tenant_id)
        return tenant

    async def _set_status(self, tenant_id: str, status: TenantStatus) -> Tenant:
        async with self._database.writing() as transaction:
            store = TenantStore(transaction)
            await store.set_status(tenant_id, status)
            tenant = _found(await store.get(tenant_id), tenant_id)
        await self._announcer.tenant_changed(tenant_id)
        return tenant


def check_name(name: str) -> None:
    """Refuse an empty or overlong name of a tenant or a key."""
    if not 0 < len(name.strip()) <= len(name) <= MAX_NAME_CHARACTERS:
        raise InvalidParameterError(
            f"'name' must have 1 to {MAX_NAME_CHARACTERS} characters. Given: {shown(name)}.",
            param="name",
        )


def check_not_empty(options: Mapping[str, object]) -> None:
    """Refuse a change that changes nothing."""
    if not options:
        raise InvalidParameterError("Nothing to change: give at least one option.")


def _check_options(options: TenantOptions | TenantChanges) -> None:
    model = options.get("default_model")
    if model is not None and not 0 < len(model.strip()) <= len(model) <= MAX_NAME_CHARACTERS:
        raise InvalidParameterError(
            f"'default_model' must have 1 to {MAX_NAME_CHARACTERS} characters. "
            f"Given: {shown(model)}.",
            param="default_model",
        )


def _check_weight(weight: float) -> None:
    if not (math.isfinite(weight) and MIN_WEIGHT <= weight <= MAX_WEIGHT):
        raise InvalidParameterError(
            f"'weight' must be a number from {MIN_WEIGHT} to {MAX_WEIGHT:g}. Given: {weight}.",
            param="weight",
        )


def _check_id(tenant_id: str) -> None:
    if _TENANT_ID.fullmatch(tenant_id) is None:
        raise InvalidParameterError(
            "'id' must have 1 to 63 characters out of a-z, 0-9 and '-'. "
            f"Given: {shown(tenant_id)}.",
            param="id",
        )


def _found(tenant: Tenant | None, tenant_id: str) -> Tenant:
    if tenant is None:
        raise NotFoundError(f"There is no tenant {shown(tenant_id)}.")
    return tenant
