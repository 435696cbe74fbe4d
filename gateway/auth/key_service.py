"""The rules of a key's life."""

import re
import secrets
from collections.abc import Collection
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy.ext.asyncio import AsyncSession
from typing_extensions import Unpack

from contract.dialect import Dialect
from gateway.accounts.audit import SYSTEM, AuditLog
from gateway.accounts.capacity import require_room
from gateway.accounts.changes import ChangeAnnouncer
from gateway.accounts.checks import check_known, check_not_empty
from gateway.accounts.database import Database
from gateway.accounts.details import details_of
from gateway.accounts.key_store import KeyStore
from gateway.accounts.limits import LimitChanges, changed_limits
from gateway.accounts.paging import Page, PageRequest
from gateway.accounts.project_service import find_project
from gateway.accounts.records import KeyOptions, KeyRecord, Network, ProjectStatus
from gateway.accounts.scopes import DEFAULT_SCOPES, Scope
from gateway.accounts.tables import ApiKeyRow
from gateway.accounts.tenant_service import reading_of_tenant
from gateway.accounts.times import utc_now
from gateway.auth.api_key import ApiKey
from gateway.auth.grants import require_rights_of
from gateway.auth.key_rules import (
    DEFAULT_GRACE,
    check_grace,
    check_lives,
    check_not_revoked,
    checked_options,
)
from gateway.auth.principal import Principal
from gateway.errors import InvalidParameterError, NotFoundError, shown

_WHOLE_KEY = re.compile(r"sk-([A-Za-z0-9]{12})(-.*)?", re.DOTALL)
_NAME_OF_KEY = re.compile(r"[A-Za-z0-9_]{1,32}")


@dataclass(frozen=True, slots=True)
class CreatedKey:
    """A key with a new secret: the only moment at which the whole key is known."""

    record: KeyRecord
    key: ApiKey


class KeyService:
    """Creates, changes, rotates and revokes tenants' keys; every change is audited.

    Where a credential of the tenant asks, it is the `grantor`: it manages only keys with no more rights than
    it has itself. Ending a key is allowed with any.
    """

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
        allowed_addresses: tuple[Network, ...] | None = None,
        expires_at: datetime | None = None,
        dialect: Dialect | None = None,
        project_id: str | None = None,
        limits: LimitChanges | None = None,
        grantor: Principal | None = None,
        actor: str = SYSTEM,
    ) -> CreatedKey:
        """Make a key for the tenant; None stands for all models, for any address, and for no end."""
        check_known(tenant_id, "tenant")
        options = checked_options(
            KeyOptions(
                name=name,
                scopes=frozenset(scopes),
                allowed_models=None if allowed_models is None else frozenset(allowed_models),
                allowed_addresses=allowed_addresses,
                expires_at=expires_at,
                dialect=dialect,
            )
        )
        columns: dict[str, Any] = {
            **options,
            "project_id": project_id,
            "limits": changed_limits({}, limits or {}),
        }
        key = ApiKey.generate()
        record = KeyRecord(
            id=f"key_{secrets.token_hex(8)}",
            tenant_id=tenant_id,
            prefix=key.prefix,
            digest=key.digest(),
            revoked_at=None,
            created_at=utc_now(),
            **columns,
        )
        if grantor is not None:
            require_rights_of(record, grantor)
        async with self._database.writing() as transaction:
            await require_room(transaction, ApiKeyRow, tenant_id)
            if project_id is not None:
                await _check_project(transaction, tenant_id, project_id)
            await KeyStore(transaction).add(tenant_id, record)
            await AuditLog(transaction).append(
                "key.create",
                record.id,
                actor=actor,
                tenant_id=tenant_id,
                details=details_of({"prefix": key.prefix, **columns}),
            )
        return CreatedKey(record, key)

    async def list_of_tenant(self, tenant_id: str) -> list[KeyRecord]:
        """Return the tenant's keys, oldest first, the revoked ones included."""
        async with reading_of_tenant(self._database, tenant_id) as transaction:
            return await KeyStore(transaction).list_of_tenant(tenant_id)

    async def page(self, tenant_id: str, wanted: PageRequest) -> Page[KeyRecord]:
        """Return some of the tenant's keys, oldest first, the revoked ones included."""
        async with reading_of_tenant(self._database, tenant_id) as transaction:
            return await KeyStore(transaction).page(tenant_id, wanted)

    async def get(self, tenant_id: str, id_or_prefix: str) -> KeyRecord:
        """Return the tenant's key."""
        async with self._database.reading() as transaction:
            return await _find(transaction, tenant_id, id_or_prefix)

    async def update(
        self,
        tenant_id: str,
        id_or_prefix: str,
        *,
        grantor: Principal | None = None,
        actor: str = SYSTEM,
        **options: Unpack[KeyOptions],
    ) -> KeyRecord:
        """Change the options that are given, on every gateway; of `limits` those that are named."""
        check_not_empty(options)
        options = checked_options(options)
        async with self._database.writing() as transaction:
            key = await _find(transaction, tenant_id, id_or_prefix, is_locked=True)
            check_not_revoked(key)
            columns: dict[str, Any] = {**options}
            if "limits" in options:
                columns["limits"] = changed_limits(key.limits, options["limits"])
            changed = replace(key, **columns)
            if grantor is not None:
                require_rights_of(key, grantor)
                require_rights_of(changed, grantor)
            await KeyStore(transaction).change(tenant_id, key.id, columns)
            await AuditLog(transaction).append(
                "key.update",
                key.id,
                actor=actor,
                tenant_id=tenant_id,
                details=details_of(options),
            )
        await self._announcer.key_changed(key.id)
        return changed

    async def rotate(
        self,
        tenant_id: str,
        id_or_prefix: str,
        *,
        grace: timedelta = DEFAULT_GRACE,
        grantor: Principal | None = None,
        actor: str = SYSTEM,
    ) -> CreatedKey:
        """Give the key a new secret. The present one works for the grace period, one before it no more."""
        check_grace(grace)
        # Told before as well: were Redis found to be away only afterwards, the new secret would be lost
        # with the error, and the next rotation would end the one in use.
        await self._announcer.key_changed((await self.get(tenant_id, id_or_prefix)).id)
        new = ApiKey.generate()
        async with self._database.writing() as transaction:
            key = await _find(transaction, tenant_id, id_or_prefix, is_locked=True)
            check_lives(key)
            if grantor is not None:
                require_rights_of(key, grantor)
            columns = _rotation(key, new, grace)
            await KeyStore(transaction).change(tenant_id, key.id, columns)
            details = {"prefix": new.prefix, "old_expires_at": columns["old_expires_at"]}
            await AuditLog(transaction).append(
                "key.rotate", key.id, actor=actor, tenant_id=tenant_id, details=details
            )
        await self._announcer.key_changed(key.id)
        return CreatedKey(replace(key, **columns), new)

    async def revoke(self, tenant_id: str, id_or_prefix: str, *, actor: str = SYSTEM) -> KeyRecord:
        """End the key on every gateway; may be repeated, for instance to announce it again."""
        async with self._database.writing() as transaction:
            key = await _find(transaction, tenant_id, id_or_prefix, is_locked=True)
            if key.revoked_at is None:
                key = replace(key, revoked_at=utc_now())
                await KeyStore(transaction).change(
                    tenant_id, key.id, {"revoked_at": key.revoked_at}
                )
                await AuditLog(transaction).append(
                    "key.revoke", key.id, actor=actor, tenant_id=tenant_id
                )
        await self._announcer.key_changed(key.id)
        return key


def public_name(key: str) -> str:
    """Return what names a key and may be repeated, even where somebody gives the whole key."""
    whole = _WHOLE_KEY.fullmatch(key)
    return key if whole is None else whole[1]


async def _find(
    transaction: AsyncSession, tenant_id: str, id_or_prefix: str, *, is_locked: bool = False
) -> KeyRecord:
    check_known(tenant_id, "tenant")
    name = public_name(id_or_prefix)
    if _NAME_OF_KEY.fullmatch(name) is None:
        # Not repeated, since it may be a key that was copied wrongly.
        raise NotFoundError(f"The tenant {shown(tenant_id)} has no such key.")
    key = await KeyStore(transaction).find(tenant_id, name, is_locked=is_locked)
    if key is None:
        raise NotFoundError(f"The tenant {shown(tenant_id)} has no key {shown(name)}.")
    return key


async def _check_project(transaction: AsyncSession, tenant_id: str, project_id: str) -> None:
    project = await find_project(transaction, tenant_id, project_id, is_locked=True)
    if project.status is ProjectStatus.ARCHIVED:
        raise InvalidParameterError(
            f"'project_id' must be a project that is not archived. Given: {shown(project_id)}.",
            param="project_id",
        )


def _rotation(key: KeyRecord, new: ApiKey, grace: timedelta) -> dict[str, Any]:
    has_grace = grace > timedelta(0)
    return {
        "prefix": new.prefix,
        "digest": new.digest(),
        "old_prefix": key.prefix if has_grace else None,
        "old_digest": key.digest if has_grace else None,
        "old_expires_at": utc_now() + grace if has_grace else None,
    }
