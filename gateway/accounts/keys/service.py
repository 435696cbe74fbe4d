"""API key lifecycle: create, change, rotate, revoke, and audit expired ones.

Expired keys stop working by themselves; their entries are for the audit log.
"""

import re
import secrets
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timedelta
from typing import Any, Final, Unpack

from sqlalchemy import ColumnElement, and_, exists, func, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from gateway.accounts.audit.log import SYSTEM, AuditLog
from gateway.accounts.changes import By, Change, Service, changing, require_room
from gateway.accounts.keys.rules import (
    DEFAULT_GRACE,
    MadeKeys,
    check_grace,
    check_lives,
    check_not_revoked,
    checked_options,
)
from gateway.accounts.plans.service import plan_of
from gateway.accounts.projects.service import find_project
from gateway.accounts.tenants.service import reading_of_tenant
from gateway.auth.api_key import ApiKey, public_name
from gateway.platform.database.engine import Database
from gateway.platform.database.paging import Page, PageRequest, find_record, read_page
from gateway.platform.database.tables import ApiKeyRow, AuditRow, SpendLimitRow
from gateway.records.checks import check_known, check_not_empty
from gateway.records.errors import (
    AuthenticationError,
    NotFoundError,
    PermissionDeniedError,
    must,
    shown,
)
from gateway.records.grants import Grant, bounds_of_key, defaults_of
from gateway.records.limits import LimitScope, SpendScope, changed_limits
from gateway.records.records import KeyOptions, KeyRecord, NewKeyOptions, Plan, ProjectStatus
from gateway.records.scopes import DEFAULT_SCOPES, OPERATOR_SCOPES, Scope
from gateway.records.times import utc_now

_NAME_OF_KEY = re.compile(r"[A-Za-z0-9_]{1,32}")
_UNBOUNDED: Final[dict[str, Any]] = dict.fromkeys(
    ("allowed_models", "allowed_addresses", "expires_at", "dialect", "project_id")
)


@dataclass(frozen=True, slots=True)
class CreatedKey:
    """A key with a new secret; the complete key is available only here."""

    record: KeyRecord
    key: ApiKey


class KeyService(Service):
    """Creates, changes, rotates and revokes tenants' keys; every change is audited.

    If a credential makes the call, its grant is the `grantor`. It sees only keys of its project,
    and creates, changes and revokes only keys without more rights than its own. Otherwise the
    methods raise PermissionDeniedError.
    """

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
        async with changing(self._database, tenant_id, actor=actor, grantor=grantor) as change:
            await require_room(change.transaction, ApiKeyRow, tenant_id)
            plan = await plan_of(change.transaction, tenant_id)
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
                await _check_maker(change.transaction, grantor)
            if record.project_id is not None:
                await _check_project(change.transaction, tenant_id, record.project_id)
            await change.insert(ApiKeyRow(**_stored(asdict(record))))
            is_former = {"is_former_secret": True} if grantor and grantor.is_former_secret else {}
            details = {"prefix": key.prefix, **columns, **is_former}
            await change.audit("key.create", record.id, details)
        return CreatedKey(record, key)

    async def page(
        self, tenant_id: str, wanted: PageRequest, *, grantor: Grant | None = None
    ) -> Page[KeyRecord]:
        """Return a page of the tenant's keys, oldest first, including revoked ones."""
        visible = _visible(tenant_id, grantor)
        async with reading_of_tenant(self._database, tenant_id) as transaction:
            return await read_page(transaction, ApiKeyRow, wanted, visible)

    async def names(
        self, tenant_id: str, ids: Collection[str], *, grantor: Grant | None = None
    ) -> dict[str, str]:
        """Return the names of those of these keys that the tenant has."""
        visible = _visible(tenant_id, grantor)
        named = select(ApiKeyRow.id, ApiKeyRow.name).where(visible, ApiKeyRow.id.in_(ids))
        async with self._database.reading() as transaction:
            return dict((await transaction.execute(named)).all())

    async def find_anywhere(self, id_or_prefix: str) -> KeyRecord | None:
        """Return a key of any tenant by its whole id or prefix."""
        prefix = id_or_prefix.removeprefix("sk-").partition("-")[0]
        named = or_(ApiKeyRow.id == id_or_prefix, ApiKeyRow.prefix == prefix)
        async with self._database.reading() as transaction:
            return await find_record(transaction, ApiKeyRow, named)

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
        async with changing(self._database, tenant_id, actor=actor, grantor=grantor) as change:
            key, plan = await _managed(change, tenant_id, id_or_prefix)
            check_not_revoked(key)
            if "limits" in options:
                columns["limits"] = changed_limits(key.limits, options["limits"])
            changed = replace(key, **columns)
            if grantor is not None:
                grantor.require_another(key.id, options)
                grantor.require(bounds_of_key(changed, plan))
            await change.set(ApiKeyRow, ApiKeyRow.id == key.id, _stored(columns))
            await change.audit("key.update", key.id, options)
            change.announce(self._announcer.key_changed, key.id)
        return changed

    async def rotate(
        self,
        tenant_id: str,
        id_or_prefix: str,
        *,
        grace: timedelta = DEFAULT_GRACE,
        made_keys: MadeKeys = MadeKeys.IN_GRACE,
        **by: Unpack[By],
    ) -> CreatedKey:
        """Create a new secret for the key.

        The current secret works for the grace period; an older one stops working. So do `made_keys`
        of the secrets before the new one; by default those that an older one made in its grace.
        """
        check_grace(grace)
        if (grantor := by.get("grantor")) is not None:
            grantor.require_current_secret()
        # Announce the change before the rotation as well. If Redis were found to be unavailable
        # only afterwards, the error would lose the new secret, and the next rotation would end the
        # one in use.
        found = await self.get(tenant_id, id_or_prefix, grantor=grantor)
        await self._announcer.key_changed(found.id)
        new = ApiKey.generate()
        async with changing(self._database, tenant_id, **by) as change:
            key, _ = await _managed(change, tenant_id, id_or_prefix)
            check_lives(key)
            made = await _lock_made(change.transaction, key, made_keys)
            columns = _rotation(key, new, grace)
            await change.set(ApiKeyRow, ApiKeyRow.id == key.id, _stored(columns))
            details = {"prefix": new.prefix, "old_expires_at": columns["old_expires_at"]}
            await change.audit("key.rotate", key.id, details)
            change.announce(self._announcer.key_changed, key.id)
            await self._revoke(change, made)
        return CreatedKey(replace(key, **columns), new)

    async def revoke(
        self,
        tenant_id: str,
        id_or_prefix: str,
        *,
        made_keys: MadeKeys = MadeKeys.IN_GRACE,
        **by: Unpack[By],
    ) -> list[KeyRecord]:
        """Revoke the key and keys that it made, on every gateway. Return them, the key first.

        A repeated call announces them again.
        """
        async with changing(self._database, tenant_id, **by) as change:
            key, _ = await _managed(change, tenant_id, id_or_prefix)
            made = await _lock_made(change.transaction, key, made_keys)
            return await self._revoke(change, [key, *made])

    async def _revoke(self, change: Change, locked: list[KeyRecord]) -> list[KeyRecord]:
        """Revoke keys. Return them as they are then."""
        now = utc_now()
        for key in locked:
            if key.revoked_at is None:
                await change.set(ApiKeyRow, ApiKeyRow.id == key.id, {"revoked_at": now})
                await change.audit("key.revoke", key.id, tenant_id=key.tenant_id)
            change.announce(self._announcer.key_changed, key.id)
        return [each if each.revoked_at else replace(each, revoked_at=now) for each in locked]


def is_key(tenant_id: str, id_or_prefix: str) -> ColumnElement[bool]:
    """Return the condition for the tenant's key with this id or public prefix, even a former."""
    columns = (ApiKeyRow.id, ApiKeyRow.prefix, ApiKeyRow.old_prefix)
    is_named = or_(*(column == id_or_prefix for column in columns))
    return and_(ApiKeyRow.tenant_id == tenant_id, is_named)


def _visible(tenant_id: str, grantor: Grant | None) -> ColumnElement[bool]:
    is_its = ApiKeyRow.tenant_id == tenant_id
    project_id = None if grantor is None else grantor.project_id
    return is_its if project_id is None else and_(is_its, ApiKeyRow.project_id == project_id)


async def _managed(
    change: Change, tenant_id: str, id_or_prefix: str
) -> tuple[KeyRecord, Plan | None]:
    """Return a locked key that the grantor may manage as it is, and its tenant's plan."""
    transaction = change.transaction
    key = await _find(transaction, tenant_id, id_or_prefix, change.grantor, is_locked=True)
    plan = await plan_of(transaction, tenant_id)
    change.require(bounds_of_key(key, plan), of=f"the key {shown(key.id)}")
    return key, plan


def _stored(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record's values as stored in the table: sets and networks as lists of text."""
    stored = dict(columns)
    for name in ("scopes", "allowed_models"):
        if stored.get(name) is not None:
            stored[name] = sorted(stored[name])
    if stored.get("allowed_addresses") is not None:
        stored["allowed_addresses"] = [str(network) for network in stored["allowed_addresses"]]
    return stored


async def _lock(transaction: AsyncSession, ids: Collection[str]) -> list[KeyRecord]:
    """Return keys of any tenants, which no other transaction changes before this one ends."""
    query = select(ApiKeyRow).where(ApiKeyRow.id.in_(ids)).order_by(ApiKeyRow.id)
    return [row.to_record() for row in await transaction.scalars(query.with_for_update())]


async def _check_maker(transaction: AsyncSession, maker: Grant) -> None:
    """Reject a key that was revoked meanwhile: what it makes must end with it."""
    for key in await _lock(transaction, [maker.credential_id]):
        if key.revoked_at is not None:
            raise AuthenticationError("The API key is revoked.")
    limited = exists().where(
        SpendLimitRow.scope == SpendScope.KEY, SpendLimitRow.holder == maker.credential_id
    )
    if await transaction.scalar(select(limited)):
        raise PermissionDeniedError("A key with a spend limit of its own cannot create keys.")


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
        makers = await _lock(transaction, ids - found.keys() - {key.id})
        found |= {each.id: each for each in makers}
    return list(found.values())


async def _find(
    transaction: AsyncSession,
    tenant_id: str,
    id_or_prefix: str,
    grantor: Grant | None = None,
    *,
    is_locked: bool = False,
) -> KeyRecord:
    check_known(tenant_id, "tenant")
    name = public_name(id_or_prefix)
    if _NAME_OF_KEY.fullmatch(name) is None:
        # The message omits the given text, since it may be an incorrectly copied key.
        raise NotFoundError(f"The tenant {shown(tenant_id)} has no such key.")
    is_it = is_key(tenant_id, name)
    key = await find_record(transaction, ApiKeyRow, is_it, is_locked=is_locked)
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


ACTION: Final = "key.expired"
AT_ONCE: Final = 100
"""Keys per transaction, which blocks every other change."""


async def audit_expired_keys(database: Database, now: datetime) -> int:
    """Append an audit row for each key that has expired since its last expiry entry.

    Two calls may run at once. Return the number of new rows. Raises StoreUnavailableError.
    """
    appended = 0
    while True:
        async with changing(database) as change:
            found = await _append_some(change, now)
        appended += found
        if found < AT_ONCE:
            return appended


async def count_expiring_keys(database: Database, now: datetime, within: timedelta) -> int:
    """Return the number of valid keys that expire within a time. Raises StoreUnavailableError."""
    expire_soon = and_(
        ApiKeyRow.expires_at > now,
        ApiKeyRow.expires_at <= now + within,
        ApiKeyRow.revoked_at.is_(None),
    )
    async with database.reading() as transaction:
        counted = await transaction.scalar(
            select(func.count()).select_from(ApiKeyRow).where(expire_soon)
        )
    return counted or 0


async def _append_some(change: Change, now: datetime) -> int:
    transaction = change.transaction
    is_expired = and_(ApiKeyRow.expires_at <= now, ApiKeyRow.revoked_at.is_(None))
    candidates = select(ApiKeyRow.id).where(is_expired, ~_has_audit_entry()).limit(AT_ONCE)
    # A concurrent call locks these rows until its transaction ends ...
    held = list(
        await transaction.scalars(candidates.with_for_update(of=ApiKeyRow, skip_locked=True))
    )
    # ... and may have ended it just now, which only another query sees.
    keys = await transaction.scalars(
        select(ApiKeyRow).where(ApiKeyRow.id.in_(held), ~_has_audit_entry())
    )
    for key in list(keys):
        details = {"expires_at": key.expires_at}
        await change.audit(ACTION, key.id, details, tenant_id=key.tenant_id)
    return len(held)


def _has_audit_entry() -> ColumnElement[bool]:
    return exists().where(
        AuditRow.tenant_id == ApiKeyRow.tenant_id,
        AuditRow.action == ACTION,
        AuditRow.subject == ApiKeyRow.id,
        # A key whose expiry was postponed may expire again.
        AuditRow.at >= ApiKeyRow.expires_at,
    )
