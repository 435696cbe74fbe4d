"""API key lifecycle: create, change, rotate and revoke."""

import re
import secrets
from collections.abc import Collection
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Final

from sqlalchemy.ext.asyncio import AsyncSession
from typing_extensions import Unpack

from gateway.auth.api_key import ApiKey
from gateway.database.engine import Database
from gateway.database.paging import Page, PageRequest
from gateway.database.tables import ApiKeyRow
from gateway.errors import AuthenticationError, NotFoundError, must, shown
from gateway.management.audit.log import SYSTEM, AuditLog
from gateway.management.keys.rules import (
    DEFAULT_GRACE,
    MadeKeys,
    check_grace,
    check_lives,
    check_not_revoked,
    checked_options,
)
from gateway.management.keys.store import KeyStore
from gateway.management.plans.store import PlanStore
from gateway.management.projects.service import find_project
from gateway.management.shared.capacity import require_room
from gateway.management.tenants.service import reading_of_tenant
from gateway.tenancy.changes import ChangeAnnouncer
from gateway.tenancy.checks import check_known, check_not_empty
from gateway.tenancy.grants import Grant, bounds_of_key, defaults_of
from gateway.tenancy.limits import LimitScope, changed_limits
from gateway.tenancy.records import (
    KeyOptions,
    KeyRecord,
    NewKeyOptions,
    Plan,
    ProjectStatus,
)
from gateway.tenancy.scopes import DEFAULT_SCOPES, OPERATOR_SCOPES, Scope
from gateway.tenancy.times import utc_now

_WHOLE_KEY = re.compile(r"sk-([A-Za-z0-9]{12})(-.*)?", re.DOTALL)
_NAME_OF_KEY = re.compile(r"[A-Za-z0-9_]{1,32}")
_UNBOUNDED: Final[dict[str, Any]] = dict.fromkeys(
    ("allowed_models", "allowed_addresses", "expires_at", "dialect", "project_id")
)


@dataclass(frozen=True, slots=True)
class CreatedKey:
    """A key with a new secret; the complete key is available only here."""

    record: KeyRecord
    key: ApiKey


class KeyService:
    """Creates, changes, rotates and revokes tenants' keys; every change is audited.

    If a credential makes the call, its grant is the `grantor`. It sees only keys of its project,
    and creates, changes and revokes only keys without more rights than its own. Otherwise the
    methods raise PermissionDeniedError.
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
        grantor: Grant | None = None,
        actor: str = SYSTEM,
        **options: Unpack[NewKeyOptions],
    ) -> CreatedKey:
        """Create a key for the tenant. Bounds that are not given are the grantor's, or none."""
        check_known(tenant_id, "tenant")
        given = checked_options({"name": name, "scopes": frozenset(scopes), **options})
        key = ApiKey.generate()
        async with self._database.writing() as transaction:
            await require_room(transaction, ApiKeyRow, tenant_id)
            plan = await PlanStore(transaction).of_tenant(tenant_id)
            if grantor is not None:
                given = grantor.inherit(given, defaults_of(plan, LimitScope.KEY))
            columns = _UNBOUNDED | given | {"limits": changed_limits({}, given.get("limits", {}))}
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
                grantor.require(bounds_of_key(record, plan))
                await _check_maker(transaction, grantor)
            if record.project_id is not None:
                await _check_project(transaction, tenant_id, record.project_id)
            await KeyStore(transaction).add(record)
            await AuditLog(transaction).append(
                "key.create",
                record.id,
                actor=actor,
                tenant_id=tenant_id,
                details={"prefix": key.prefix, **columns}
                | ({"is_former_secret": True} if grantor and grantor.is_former_secret else {}),
            )
        return CreatedKey(record, key)

    async def list_of_tenant(self, tenant_id: str) -> list[KeyRecord]:
        """Return the tenant's keys, oldest first, including revoked ones."""
        async with reading_of_tenant(self._database, tenant_id) as transaction:
            return await KeyStore(transaction).list_of_tenant(tenant_id)

    async def page(
        self, tenant_id: str, wanted: PageRequest, *, grantor: Grant | None = None
    ) -> Page[KeyRecord]:
        """Return a page of the tenant's keys, oldest first, including revoked ones."""
        project_id = None if grantor is None else grantor.project_id
        async with reading_of_tenant(self._database, tenant_id) as transaction:
            return await KeyStore(transaction).page(tenant_id, wanted, project_id=project_id)

    async def names(
        self, tenant_id: str, ids: Collection[str], *, grantor: Grant | None = None
    ) -> dict[str, str]:
        """Return the names of those of these keys that the tenant has."""
        project_id = None if grantor is None else grantor.project_id
        async with self._database.reading() as transaction:
            return await KeyStore(transaction).names(tenant_id, ids, project_id=project_id)

    async def get(
        self, tenant_id: str, id_or_prefix: str, *, grantor: Grant | None = None
    ) -> KeyRecord:
        """Return the tenant's key."""
        async with self._database.reading() as transaction:
            return await _find(transaction, tenant_id, id_or_prefix, grantor)

    async def update(
        self,
        tenant_id: str,
        id_or_prefix: str,
        *,
        grantor: Grant | None = None,
        actor: str = SYSTEM,
        **options: Unpack[KeyOptions],
    ) -> KeyRecord:
        """Change the given options on every gateway; of `limits`, only those it contains."""
        check_not_empty(options)
        columns = checked_options(options)
        async with self._database.writing() as transaction:
            key, plan = await _managed(transaction, tenant_id, id_or_prefix, grantor)
            check_not_revoked(key)
            if "limits" in options:
                columns["limits"] = changed_limits(key.limits, options["limits"])
            changed = replace(key, **columns)
            if grantor is not None:
                grantor.require_another(key.id, options)
                grantor.require(bounds_of_key(changed, plan))
            await KeyStore(transaction).change(tenant_id, key.id, columns)
            await AuditLog(transaction).append(
                "key.update", key.id, actor=actor, tenant_id=tenant_id, details=options
            )
        await self._announcer.key_changed(key.id)
        return changed

    async def rotate(
        self,
        tenant_id: str,
        id_or_prefix: str,
        *,
        grace: timedelta = DEFAULT_GRACE,
        grantor: Grant | None = None,
        actor: str = SYSTEM,
    ) -> CreatedKey:
        """Create a new secret for the key.

        The current secret works for the grace period; an older one stops working, and so do the
        keys that it made.
        """
        check_grace(grace)
        # Announce the change before the rotation as well. If Redis were found to be unavailable
        # only afterwards, the error would lose the new secret, and the next rotation would end the
        # one in use.
        found = await self.get(tenant_id, id_or_prefix, grantor=grantor)
        await self._announcer.key_changed(found.id)
        new = ApiKey.generate()
        async with self._database.writing() as transaction:
            key, _ = await _managed(transaction, tenant_id, id_or_prefix, grantor)
            check_lives(key)
            made = await _lock_made(transaction, key, MadeKeys.IN_GRACE)
            columns = _rotation(key, new, grace)
            await KeyStore(transaction).change(tenant_id, key.id, columns)
            details = {"prefix": new.prefix, "old_expires_at": columns["old_expires_at"]}
            await AuditLog(transaction).append(
                "key.rotate", key.id, actor=actor, tenant_id=tenant_id, details=details
            )
            await _revoke(transaction, made, actor=actor)
        for each in (key, *made):
            await self._announcer.key_changed(each.id)
        return CreatedKey(replace(key, **columns), new)

    async def revoke(
        self,
        tenant_id: str,
        id_or_prefix: str,
        *,
        grantor: Grant | None = None,
        actor: str = SYSTEM,
        made_keys: MadeKeys = MadeKeys.IN_GRACE,
    ) -> list[KeyRecord]:
        """Revoke the key and keys that it made, on every gateway. Return them, the key first.

        A repeated call announces them again.
        """
        async with self._database.writing() as transaction:
            key, _ = await _managed(transaction, tenant_id, id_or_prefix, grantor)
            made = await _lock_made(transaction, key, made_keys)
            revoked = await _revoke(transaction, [key, *made], actor=actor)
        for each in revoked:
            await self._announcer.key_changed(each.id)
        return revoked


def public_name(key: str) -> str:
    """Return a name of the key that is safe to show, even if the caller passes the whole key."""
    whole = _WHOLE_KEY.fullmatch(key)
    return key if whole is None else whole[1]


async def _managed(
    transaction: AsyncSession, tenant_id: str, id_or_prefix: str, grantor: Grant | None
) -> tuple[KeyRecord, Plan | None]:
    """Return a locked key that the grantor may manage as it is, and its tenant's plan."""
    key = await _find(transaction, tenant_id, id_or_prefix, grantor, is_locked=True)
    plan = await PlanStore(transaction).of_tenant(tenant_id)
    if grantor is not None:
        grantor.require(bounds_of_key(key, plan), of=f"the key {shown(key.id)}")
    return key, plan


async def _check_maker(transaction: AsyncSession, maker: Grant) -> None:
    """Reject a key that was revoked meanwhile: what it makes must end with it."""
    for key in await KeyStore(transaction).lock([maker.credential_id]):
        if key.revoked_at is not None:
            raise AuthenticationError("The API key is revoked.")


async def _lock_made(transaction: AsyncSession, key: KeyRecord, which: MadeKeys) -> list[KeyRecord]:
    """Return the locked keys that a locked key made, and those that these made, and so on."""
    is_former = which is MadeKeys.IN_GRACE
    if which is MadeKeys.NONE or (is_former and key.old_prefix is None):
        return []
    found: dict[str, KeyRecord] = {}
    makers = [key]
    while makers:
        is_of_operator = any(OPERATOR_SCOPES & each.scopes for each in makers)
        ids = await AuditLog(transaction).made_keys(
            [each.id for each in makers],
            tenant_id=None if is_of_operator else key.tenant_id,
            by_former_secret=is_former and not found,
        )
        makers = await KeyStore(transaction).lock(ids - found.keys() - {key.id})
        found |= {each.id: each for each in makers}
    return list(found.values())


async def _revoke(
    transaction: AsyncSession, locked: list[KeyRecord], *, actor: str
) -> list[KeyRecord]:
    """Revoke keys. Return them as they are now."""
    now = utc_now()
    for key in locked:
        if key.revoked_at is None:
            await KeyStore(transaction).change(key.tenant_id, key.id, {"revoked_at": now})
            await AuditLog(transaction).append(
                "key.revoke", key.id, actor=actor, tenant_id=key.tenant_id
            )
    return [each if each.revoked_at else replace(each, revoked_at=now) for each in locked]


async def _find(
    transaction: AsyncSession,
    tenant_id: str,
    id_or_prefix: str,
    grantor: Grant | None,
    *,
    is_locked: bool = False,
) -> KeyRecord:
    check_known(tenant_id, "tenant")
    name = public_name(id_or_prefix)
    if _NAME_OF_KEY.fullmatch(name) is None:
        # The message omits the given text, since it may be an incorrectly copied key.
        raise NotFoundError(f"The tenant {shown(tenant_id)} has no such key.")
    key = await KeyStore(transaction).find(tenant_id, name, is_locked=is_locked)
    if key is None or (grantor is not None and not grantor.sees(key.project_id)):
        raise NotFoundError(f"The tenant {shown(tenant_id)} has no key {shown(name)}.")
    return key


async def _check_project(transaction: AsyncSession, tenant_id: str, project_id: str) -> None:
    project = await find_project(transaction, tenant_id, project_id, is_locked=True)
    if project.status is ProjectStatus.ARCHIVED:
        raise must("project_id", "be a project that is not archived", project_id)


def _rotation(key: KeyRecord, new: ApiKey, grace: timedelta) -> dict[str, Any]:
    has_grace = grace > timedelta(0)
    return {
        "prefix": new.prefix,
        "digest": new.digest(),
        "old_prefix": key.prefix if has_grace else None,
        "old_digest": key.digest if has_grace else None,
        "old_expires_at": utc_now() + grace if has_grace else None,
    }
