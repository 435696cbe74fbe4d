"""Queries on the table `tenants`."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from sqlalchemy import and_, exists, select, update
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import aliased

from gateway.accounts.paging import Page, PageRequest, read_page
from gateway.accounts.records import Member, Plan, Project, Tenant
from gateway.accounts.tables import MemberRow, PlanRow, ProjectRow, TenantRow


class Caller(NamedTuple):
    """A tenant, and the member and project that a token of one of its people names."""

    tenant: Tenant
    plan: Plan | None
    member: Member | None
    project: Project | None
    has_members: bool
    """Whether the tenant has any member; tokens of other people are then rejected."""


class TenantStore:
    """The tenants, within one transaction."""

    def __init__(self, transaction: AsyncSession) -> None:
        self._transaction = transaction

    async def add(self, tenant: Tenant) -> None:
        """Insert a tenant; its id must be unused."""
        self._transaction.add(
            TenantRow(
                id=tenant.id,
                name=tenant.name,
                weight=tenant.weight,
                status=tenant.status,
                created_at=tenant.created_at,
                dialect=tenant.dialect,
                strict_parameters=tenant.strict_parameters,
                default_model=tenant.default_model,
                plan_id=tenant.plan_id,
                limits=tenant.limits,
                billing=tenant.billing,
                service_tier=tenant.service_tier,
                shows_cost=tenant.shows_cost,
            )
        )
        await self._transaction.flush()

    async def get(self, tenant_id: str) -> Tenant | None:
        """Return the tenant, or None if it does not exist."""
        row = await self._transaction.get(TenantRow, tenant_id)
        return None if row is None else row.to_record()

    async def lock(self, tenant_id: str) -> Tenant | None:
        """Return the tenant, locked until the end of the transaction."""
        row = await self._transaction.scalar(
            select(TenantRow).where(TenantRow.id == tenant_id).with_for_update()
        )
        return None if row is None else row.to_record()

    async def has_plan(self, plan_id: str) -> bool:
        """Whether the plan exists."""
        return await self._transaction.get(PlanRow, plan_id) is not None

    async def find_caller(
        self, tenant_id: str, *, subject: str, project_id: str | None
    ) -> Caller | None:
        """Return the caller that a token identifies, or None if the tenant does not exist."""
        of_tenant = MemberRow.tenant_id == TenantRow.id
        anybody = aliased(MemberRow)
        has_members = exists().where(anybody.tenant_id == TenantRow.id)
        found = await self._transaction.execute(
            select(TenantRow, PlanRow, MemberRow, ProjectRow, has_members)
            .outerjoin(PlanRow, PlanRow.id == TenantRow.plan_id)
            .outerjoin(MemberRow, and_(of_tenant, MemberRow.subject == subject))
            .outerjoin(
                ProjectRow,
                and_(ProjectRow.tenant_id == TenantRow.id, ProjectRow.id == project_id),
            )
            .where(TenantRow.id == tenant_id)
        )
        row: Any = found.one_or_none()
        if row is None:
            return None
        tenant, plan, member, project, has_any = row
        return Caller(
            tenant.to_record(),
            None if plan is None else plan.to_record(),
            None if member is None else member.to_record(),
            None if project is None else project.to_record(),
            has_any,
        )

    async def list_all(self) -> list[Tenant]:
        """Return all tenants, oldest first."""
        rows = await self._transaction.scalars(
            select(TenantRow).order_by(TenantRow.created_at, TenantRow.id)
        )
        return [row.to_record() for row in rows]

    async def page(self, wanted: PageRequest) -> Page[Tenant]:
        """Return a page of all tenants, oldest first."""
        page = await read_page(self._transaction, TenantRow, wanted)
        return Page([row.to_record() for row in page.entries], page.has_more)

    async def change(self, tenant_id: str, columns: Mapping[str, Any]) -> None:
        """Change one or more columns of an existing tenant."""
        await self._transaction.execute(
            update(TenantRow).where(TenantRow.id == tenant_id).values(**columns)
        )
