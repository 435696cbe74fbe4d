"""What holders of limits have: the rows of a tenant, or of one of its projects or keys."""

from dataclasses import replace
from typing import Final

from sqlalchemy import ColumnElement, and_, func, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from gateway.platform.database.tables import BatchRow, LedgerRow, SpendLimitRow, TenantRow
from gateway.records.batches import ENDED
from gateway.records.limits import (
    JWT_PREFIX,
    LimitScope,
    SpendScope,
    SubjectLimits,
    credential_of,
)
from gateway.records.spending import SpendLimit

_COLUMNS: Final = {
    LimitScope.TENANT: "tenant_id",
    LimitScope.PROJECT: "project_id",
    LimitScope.KEY: "credential_id",
}


def held_by(
    table: type[BatchRow] | type[LedgerRow], tenant_id: str, scope: LimitScope, holder: str
) -> ColumnElement[bool]:
    """Return the condition for the rows of a tenant, or of its project or key."""
    return and_(table.tenant_id == tenant_id, getattr(table, _COLUMNS[scope]) == holder)


async def spend_limits_of(
    transaction: AsyncSession, *conditions: ColumnElement[bool]
) -> list[SpendLimit]:
    """Return the spend limits that meet the conditions, oldest first."""
    found = await transaction.execute(
        select(SpendLimitRow, TenantRow.time_zone)
        .join(TenantRow, TenantRow.id == SpendLimitRow.tenant_id)
        .where(*conditions)
        .order_by(SpendLimitRow.created_at, SpendLimitRow.id)
    )
    return [replace(row.to_record(), time_zone=time_zone) for row, time_zone in found]


def may_count_for(
    tenant_id: str, credential_id: str, project_id: str | None
) -> tuple[ColumnElement[bool], ...]:
    """Return the conditions for the spend limits that may count requests of a credential."""
    scope, holder = SpendLimitRow.scope, SpendLimitRow.holder
    of_credential = SpendScope.MEMBER if credential_id.startswith(JWT_PREFIX) else SpendScope.KEY
    return SpendLimitRow.tenant_id == tenant_id, or_(
        scope.in_((SpendScope.TENANT, SpendScope.USER)),
        and_(scope == of_credential, holder == credential_id.removeprefix(JWT_PREFIX)),
        and_(scope == SpendScope.PROJECT, holder == project_id),
    )


def counted_by(tenant_id: str, subject: SubjectLimits) -> ColumnElement[bool]:
    """Return the condition for the rows of the ledger that a holder of limits counts."""
    spending = subject.spending
    if spending is None:
        return held_by(LedgerRow, tenant_id, subject.scope, subject.id)
    conditions = [LedgerRow.tenant_id == tenant_id]
    if spending.model is not None:
        conditions.append(LedgerRow.model == spending.model)
    if (credential_id := credential_of(spending.scope, spending.holder)) is not None:
        conditions.append(LedgerRow.credential_id == credential_id)
    if spending.scope is SpendScope.PROJECT:
        conditions.append(LedgerRow.project_id == spending.holder)
    if spending.scope is SpendScope.USER:
        conditions.append(LedgerRow.end_user == spending.user)
    return and_(*conditions)


async def tokens_in_batches(
    transaction: AsyncSession, tenant_id: str, scope: LimitScope, holder: str
) -> int:
    """Return the estimated tokens in running batches of a tenant, or of its project or key."""
    is_its, is_open = held_by(BatchRow, tenant_id, scope, holder), BatchRow.status.not_in(ENDED)
    tokens = await transaction.scalar(select(func.sum(BatchRow.tokens)).where(is_its, is_open))
    return int(tokens or 0)
