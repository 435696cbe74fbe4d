"""Queries on the table `plans`."""

from collections.abc import Mapping

from sqlalchemy import select, update
from sqlalchemy.ext.asyncio import AsyncSession

from gateway.database.tables import PlanRow, TenantRow
from gateway.tenancy.limits import LimitScope, LimitValues
from gateway.tenancy.records import Plan


class PlanStore:
    """The plans, within one transaction."""

    def __init__(self, transaction: AsyncSession) -> None:
        self._transaction = transaction

    async def add(self, plan: Plan) -> None:
        """Insert a plan; its id must be unused."""
        self._transaction.add(
            PlanRow(id=plan.id, name=plan.name, created_at=plan.created_at, **_columns(plan.limits))
        )
        await self._transaction.flush()

    async def get(self, plan_id: str, *, for_update: bool = False) -> Plan | None:
        """Return the plan, or None if it does not exist; `for_update` locks it until the end."""
        query = select(PlanRow).where(PlanRow.id == plan_id)
        row = await self._transaction.scalar(query.with_for_update() if for_update else query)
        return None if row is None else row.to_record()

    async def of_tenant(self, tenant_id: str) -> Plan | None:
        """Return the plan of a tenant, or None if it has none."""
        query = select(PlanRow).join(TenantRow, TenantRow.plan_id == PlanRow.id)
        row = await self._transaction.scalar(query.where(TenantRow.id == tenant_id))
        return None if row is None else row.to_record()

    async def list_all(self) -> list[Plan]:
        """Return all plans, oldest first."""
        rows = await self._transaction.scalars(
            select(PlanRow).order_by(PlanRow.created_at, PlanRow.id)
        )
        return [row.to_record() for row in rows]

    async def set_options(
        self, plan_id: str, *, name: str, limits: Mapping[LimitScope, LimitValues]
    ) -> None:
        """Change an existing plan."""
        await self._transaction.execute(
            update(PlanRow).where(PlanRow.id == plan_id).values(name=name, **_columns(limits))
        )


def _columns(limits: Mapping[LimitScope, LimitValues]) -> dict[str, LimitValues]:
    return {f"{scope}_limits": limits.get(scope, {}) for scope in LimitScope}
