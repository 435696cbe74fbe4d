"""The unit of work of a change: transaction, lock, audit entries, and announcements after it."""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, Final, TypedDict

from sqlalchemy import ColumnElement, func, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession

from gateway.accounts.audit.log import SYSTEM, AuditLog
from gateway.platform.changes import ChangeAnnouncer
from gateway.platform.database.claims import lock_tenant
from gateway.platform.database.engine import Database
from gateway.platform.database.tables import (
    ApiKeyRow,
    MemberRow,
    ProjectRow,
    SpendAlertRow,
    SpendLimitRow,
    Table,
)
from gateway.records.checks import check_known
from gateway.records.errors import ConflictError, shown
from gateway.records.grants import Bounds, Grant


class By(TypedDict, total=False):
    """Who makes a change."""

    actor: str
    """The name in the audit log; default: `SYSTEM`."""
    grantor: Grant | None
    """Rights of the tenant's credential that makes the change; None: of an operator."""


@dataclass(slots=True, kw_only=True)
class Change:
    """A change within one transaction."""

    transaction: AsyncSession
    tenant_id: str | None
    actor: str
    grantor: Grant | None
    announcements: list[Callable[[], Awaitable[None]]] = field(default_factory=list)

    def require(self, bounds: Bounds, *, of: str = "") -> None:
        """Raise PermissionDeniedError if something has more rights than the grantor."""
        if self.grantor is not None:
            self.grantor.require(bounds, of=of)

    async def audit(
        self,
        action: str,
        subject: str,
        details: Mapping[str, Any] | None = None,
        *,
        tenant_id: str | None = None,
    ) -> None:
        """Append an audit entry, which is committed together with the change.

        `tenant_id` replaces the tenant of the change.
        """
        await AuditLog(self.transaction).append(
            action,
            subject,
            actor=self.actor,
            tenant_id=tenant_id or self.tenant_id,
            details=details,
        )

    async def insert(self, row: Table) -> None:
        """Insert a row; raises ConflictError as `changing` says."""
        self.transaction.add(row)
        await self.transaction.flush()

    async def set(
        self, table: type[Table], is_it: ColumnElement[bool], columns: Mapping[str, Any]
    ) -> None:
        """Set columns of rows."""
        await self.transaction.execute(update(table).where(is_it).values(**columns))

    def announce(self, announcement: Callable[..., Awaitable[None]], *subject: str) -> None:
        """Announce the change after the commit; not at all if the transaction fails."""
        self.announcements.append(partial(announcement, *subject))


@asynccontextmanager
async def changing(
    database: Database,
    tenant_id: str | None = None,
    *,
    actor: str = SYSTEM,
    grantor: Grant | None = None,
    is_locked: bool = False,
    conflict: str = "",
) -> AsyncIterator[Change]:
    """Open a transaction, which commits at the end of the block, and announce the change then.

    An error in the block or of the commit leaves nothing, and nothing is announced.

    Args:
        database: what the block changes.
        tenant_id: the tenant to whose audit log the entries belong.
        actor: the name in the audit log.
        grantor: the rights that bound the change.
        is_locked: whether no other such change of the tenant runs at the same time.
        conflict: the message of the ConflictError for a row that exists already.

    Raises NotFoundError if a tenant to lock does not exist.
    """
    try:
        async with database.writing() as transaction:
            if is_locked and tenant_id is not None:
                check_known(tenant_id, "tenant")
                await lock_tenant(transaction, tenant_id)
            change = Change(
                transaction=transaction, tenant_id=tenant_id, actor=actor, grantor=grantor
            )
            yield change
    except IntegrityError as error:
        if not conflict:
            raise
        raise ConflictError(conflict) from error
    for announce in change.announcements:
        await announce()


class Service:
    """Base of the services that change and show what a database stores."""

    def __init__(self, database: Database, announcer: ChangeAnnouncer) -> None:
        self._database = database
        self._announcer = announcer


Holding = (
    type[ApiKeyRow] | type[MemberRow] | type[ProjectRow] | type[SpendAlertRow] | type[SpendLimitRow]
)

MOST_OF_TENANT: Final[Mapping[Holding, int]] = MappingProxyType(
    {
        ApiKeyRow: 10_000,
        MemberRow: 1_000,
        ProjectRow: 1_000,
        SpendAlertRow: 100,
        SpendLimitRow: 1_000,
    }
)
"""Maximum rows of one tenant, including revoked keys and archived projects, which are kept."""

_NAMES: Final[Mapping[Holding, str]] = MappingProxyType(
    {
        ApiKeyRow: "keys",
        MemberRow: "members",
        ProjectRow: "projects",
        SpendAlertRow: "spend alerts",
        SpendLimitRow: "spend limits",
    }
)


async def require_room(transaction: AsyncSession, table: Holding, tenant_id: str) -> None:
    """Raise ConflictError if the tenant has the maximum number.

    Additions to one tenant are serialized.
    """
    await lock_tenant(transaction, tenant_id)
    number = await transaction.scalar(
        select(func.count()).select_from(table).where(table.tenant_id == tenant_id)
    )
    if (number or 0) >= MOST_OF_TENANT[table]:
        raise ConflictError(
            f"The tenant {shown(tenant_id)} already has {number} {_NAMES[table]}, the maximum."
        )
