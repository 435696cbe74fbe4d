"""Queries of authentication: a credential with its tenant, plan, project and member."""

from itertools import chain
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, and_, exists, or_, select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import aliased

from gateway.platform.database.holders import may_count_for, spend_limits_of
from gateway.platform.database.tables import (
    ApiKeyRow,
    MemberRow,
    PlanRow,
    ProjectRow,
    TenantRow,
)
from gateway.records.limits import JWT_PREFIX
from gateway.records.records import KeyRecord, Member, Person, Plan, Project, Tenant
from gateway.records.spending import SpendLimit


class KeyOwner(NamedTuple):
    """A key and its owner."""

    key: KeyRecord
    tenant: Tenant
    project: Project | None
    plan: Plan | None
    spend_limits: tuple[SpendLimit, ...]


class TenantMember(NamedTuple):
    """A tenant, and the member and project that one of its people is and uses."""

    tenant: Tenant
    plan: Plan | None
    member: Member | None
    project: Project | None
    has_members: bool
    """Whether the tenant has any member; tokens of other people are then rejected."""
    spend_limits: tuple[SpendLimit, ...]


async def find_owner(transaction: AsyncSession, name: str) -> KeyOwner | None:
    """Return the key with this id or public prefix, even a former one, and its owner."""
    columns = (ApiKeyRow.id, ApiKeyRow.prefix, ApiKeyRow.old_prefix)
    found = await transaction.execute(
        select(ApiKeyRow, TenantRow, ProjectRow, PlanRow)
        .join(TenantRow, TenantRow.id == ApiKeyRow.tenant_id)
        .outerjoin(ProjectRow, ProjectRow.id == ApiKeyRow.project_id)
        .outerjoin(PlanRow, PlanRow.id == TenantRow.plan_id)
        .where(or_(*(column == name for column in columns)))
    )
    row: Any = found.one_or_none()
    if row is None:
        return None
    key, tenant, project, plan = map(_record, row)
    may_count = may_count_for(tenant.id, key.id, key.project_id)
    limits = await spend_limits_of(transaction, *may_count)
    return KeyOwner(key, tenant, project, plan, tuple(limits))


def _record(row: Any) -> Any:
    return None if row is None else row.to_record()


async def find_origins(transaction: AsyncSession) -> frozenset[str]:
    """Return the origins of web pages that any tenant allows."""
    found = await transaction.scalars(
        select(TenantRow.cors_origins).where(TenantRow.cors_origins.is_not(None))
    )
    return frozenset(chain.from_iterable(found))


def is_person(person: Person) -> ColumnElement[bool]:
    """Return the condition that a row of the members is a person.

    The same subject of another issuer is another person.
    """
    is_of_issuer = MemberRow.issuer == person.issuer
    if person.is_of_deployment:
        is_of_issuer = or_(is_of_issuer, MemberRow.issuer.is_(None))
    return and_(MemberRow.subject == person.subject, is_of_issuer)


async def find_caller(
    transaction: AsyncSession, tenant_id: str, person: Person, *, project_id: str | None
) -> TenantMember | None:
    """Return the caller that a person is, or None if the tenant does not exist."""
    of_tenant = MemberRow.tenant_id == TenantRow.id
    anybody = aliased(MemberRow)
    has_members = exists().where(anybody.tenant_id == TenantRow.id)
    found = await transaction.execute(
        select(TenantRow, PlanRow, MemberRow, ProjectRow, has_members)
        .outerjoin(PlanRow, PlanRow.id == TenantRow.plan_id)
        .outerjoin(MemberRow, and_(of_tenant, is_person(person)))
        .outerjoin(
            ProjectRow,
            and_(ProjectRow.tenant_id == TenantRow.id, ProjectRow.id == project_id),
        )
        .where(TenantRow.id == tenant_id)
    )
    row: Any = found.one_or_none()
    if row is None:
        return None
    tenant, plan, member, project = map(_record, row[:4])
    may_count = may_count_for(tenant_id, f"{JWT_PREFIX}{person.subject}", project_id)
    limits = await spend_limits_of(transaction, *may_count)
    return TenantMember(tenant, plan, member, project, row[4], tuple(limits))
