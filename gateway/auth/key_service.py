"""The rules of a key's life."""

import secrets
from collections.abc import Collection
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Final

from typing_extensions import Unpack

from contract.dialect import Dialect
from gateway.accounts.changes import ChangeAnnouncer
from gateway.accounts.database import Database
from gateway.accounts.key_store import KeyStore
from gateway.accounts.records import KeyOptions, KeyRecord
from gateway.accounts.scopes import DEFAULT_SCOPES, Scope
from gateway.accounts.tenant_service import check_name, check_not_empty
from gateway.accounts.tenant_store import TenantStore
from gateway.accounts.times import utc_now
from gateway.auth.api_key import ApiKey
from gateway.errors import InvalidParameterError, NotFoundError, shown

MAX_ALLOWED_MODELS: Final = 1000


@dataclass(frozen=True, slots=True)
class CreatedKey:
    """A new key: the only moment at which the whole key is known."""

    record: KeyRecord
    key: ApiKey


class KeyService:
    """Creates, changes and revokes tenants' keys."""

    def __init__(self, database: Database, announcer: ChangeAnnouncer) -> None:
        self._database = database
        self._announcer = announcer

    async def create(
        self,
        tenant_id: str,
        *,
        name: str,
        scopes: Collection[Scope] = DEFAULT_SCOPES,
        allowed_models: Collection[str] | None = None,
        expires_at: datetime | None = None,
        dialect: Dialect | None = None,
    ) -> CreatedKey:
        """Make a key for the tenant; `allowed_models` None stands for all models."""
        check_name(name)
        _check_limits(scopes, allowed_models, expires_at)
        key = ApiKey.generate()
        record = KeyRecord(
            id=f"key_{secrets.token_hex(8)}",
            tenant_id=tenant_id,
            prefix=key.prefix,
            digest=key.digest(),
            name=name,
            scopes=frozenset(scopes),
            allowed_models=None if allowed_models is None else frozenset(allowed_models),
            expires_at=expires_at,
            revoked_at=None,
            created_at=utc_now(),
            dialect=dialect,
        )
        async with self._database.writing() as transaction:
            if await TenantStore(transaction).get(tenant_id) is None:
                raise NotFoundError(f"There is no tenant {shown(tenant_id)}.")
            await KeyStore(transaction).add(tenant_id, record)
        return CreatedKey(record, key)

    async def list_of_tenant(self, tenant_id: str) -> list[KeyRecord]:
        """Return the tenant's keys, oldest first, the revoked ones included."""
        async with self._database.reading() as transaction:
            if await TenantStore(transaction).get(tenant_id) is None:
                raise NotFoundError(f"There is no tenant {shown(tenant_id)}.")
            return await KeyStore(transaction).list_of_tenant(tenant_id)

    async def update(
        self, tenant_id: str, id_or_prefix: str, **options: Unpack[KeyOptions]
    ) -> KeyRecord:
        """Change the options that are given, on every gateway."""
        check_not_empty(options)
        async with self._database.writing() as transaction:
            store = KeyStore(transaction)
            key = await _find(store, tenant_id, id_or_prefix)
            await store.set_options(tenant_id, key.id, options)
        await self._announcer.key_changed(key.id)
        return replace(key, **options)

    async def revoke(self, tenant_id: str, id_or_prefix: str) -> None:
        """End the key on every gateway; may be repeated, for instance to announce it again."""
        async with self._database.writing() as transaction:
            store = KeyStore(transaction)
            key = await _find(store, tenant_id, id_or_prefix)
            if key.revoked_at is None:
                await store.set_revoked(tenant_id, key.id, utc_now())
        await self._announcer.key_changed(key.id)


async def _find(store: KeyStore, tenant_id: str, id_or_prefix: str) -> KeyRecord:
    key = await store.find(tenant_id, id_or_prefix)
    if key is None:
        raise NotFoundError(f"The tenant {shown(tenant_id)} has no key {shown(id_or_prefix)}.")
    return key


def _check_limits(
    scopes: Collection[Scope], allowed_models: Collection[str] | None, expires_at: datetime | None
) -> None:
    if not scopes:
        raise InvalidParameterError("'scopes' must name at least one scope.", param="scopes")
    if allowed_models is not None and not 0 < len(allowed_models) <= MAX_ALLOWED_MODELS:
        raise InvalidParameterError(
            f"'allowed_models' must name 1 to {MAX_ALLOWED_MODELS} models. "
            f"Given: {len(allowed_models)}.",
            param="allowed_models",
        )
    if expires_at is not None and expires_at <= utc_now():
        raise InvalidParameterError(
            f"'expires_at' must be in the future. Given: {expires_at.isoformat()}.",
            param="expires_at",
        )
