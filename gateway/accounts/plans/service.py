"""Plans: default limits for groups of tenants."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from gateway.accounts.audit.log import SYSTEM
from gateway.accounts.changes import Service, changing
from gateway.accounts.plans.spending import apply_plans, changed_spend_limits
from gateway.platform.database.paging import find_record, list_records
from gateway.platform.database.tables import PlanRow, TenantRow
from gateway.records.checks import check_known, check_name, check_new_id, check_not_empty
from gateway.records.errors import NotFoundError, shown
from gateway.records.limits import LimitScope, LimitValues
from gateway.records.records import Plan
from gateway.records.times import utc_now

ScopedLimits = Mapping[LimitScope, LimitValues]
"""Limits for tenants, projects and keys. In a plan, None and an absent limit both mean no limit."""
SpendAmounts = Mapping[str, int | None]
"""Micro-dollars of spend limits by the names that `spending` describes; None removes one."""


class PlanService(Service):
    """Creates and changes plans. Plans are never removed, so that no tenant loses its limits."""

    async def create(
        self,
        plan_id: str,
        *,
        name: str | None = None,
        limits: ScopedLimits | None = None,
        spend_limits: SpendAmounts | None = None,
        actor: str = SYSTEM,
    ) -> Plan:
        """Create a plan; without a name, its id is its name."""
        check_new_id(plan_id)
        if name is not None:
            check_name(name)
        plan = Plan(
            id=plan_id,
            name=name or plan_id,
            limits=_merged({}, limits or {}),
            spend_limits=changed_spend_limits({}, spend_limits or {}),
            created_at=utc_now(),
        )
        conflict = f"The plan {shown(plan_id)} already exists."
        async with changing(self._database, actor=actor, conflict=conflict) as change:
            await change.insert(PlanRow(id=plan_id, created_at=plan.created_at, **_columns(plan)))
            await change.audit("plan.create", plan_id, _columns(plan))
        return plan

    async def update(
        self,
        plan_id: str,
        *,
        name: str | None = None,
        limits: ScopedLimits | None = None,
        spend_limits: SpendAmounts | None = None,
        actor: str = SYSTEM,
    ) -> Plan:
        """Change the name and the given limits, for all holders without their own limits.

        Each tenant of the plan has all of its spend limits, besides its own.
        """
        check_known(plan_id, "plan")
        given = spend_limits or any((limits or {}).values())
        check_not_empty({} if name is None and not given else {"name": name})
        if name is not None:
            check_name(name)
        async with changing(self._database, actor=actor) as change:
            old = await _find(change.transaction, plan_id, is_locked=True)
            plan = replace(
                old,
                name=name or old.name,
                limits=_merged(old.limits, limits or {}),
                spend_limits=changed_spend_limits(old.spend_limits, spend_limits or {}),
            )
            await change.set(PlanRow, PlanRow.id == plan_id, _columns(plan))
            if plan.spend_limits != old.spend_limits:
                await apply_plans(change.transaction, TenantRow.plan_id == plan_id)
            await change.audit("plan.update", plan_id, _columns(plan))
            change.announce(self._announcer.plan_changed)
        return plan

    async def list_all(self) -> list[Plan]:
        """Return all plans, oldest first."""
        async with self._database.reading() as transaction:
            return await list_records(transaction, PlanRow)

    async def tenants(self) -> dict[str, int]:
        """Return the number of tenants of each plan that has one."""
        counted = select(TenantRow.plan_id, func.count()).group_by(TenantRow.plan_id)
        async with self._database.reading() as transaction:
            found = await transaction.execute(counted.where(TenantRow.plan_id.is_not(None)))
            return {plan_id: count for plan_id, count in found if plan_id is not None}

    async def get(self, plan_id: str) -> Plan:
        """Return the plan."""
        check_known(plan_id, "plan")
        async with self._database.reading() as transaction:
            return await _find(transaction, plan_id)


async def plan_of(transaction: AsyncSession, tenant_id: str) -> Plan | None:
    """Return the plan of a tenant, or None if it has none."""
    its_plan = select(TenantRow.plan_id).where(TenantRow.id == tenant_id).scalar_subquery()
    return await find_record(transaction, PlanRow, PlanRow.id == its_plan)


def _merged(old: ScopedLimits, new: ScopedLimits) -> ScopedLimits:
    return {scope: _set({**old.get(scope, {}), **new.get(scope, {})}) for scope in LimitScope}


def _set(limits: LimitValues) -> LimitValues:
    """Return the limits without those that mean no limit."""
    return {name: value for name, value in limits.items() if value is not None}


async def _find(transaction: AsyncSession, plan_id: str, *, is_locked: bool = False) -> Plan:
    plan = await find_record(transaction, PlanRow, PlanRow.id == plan_id, is_locked=is_locked)
    if plan is None:
        raise NotFoundError(f"There is no plan {shown(plan_id)}.")
    return plan


def _columns(plan: Plan) -> dict[str, Any]:
    limits = {f"{scope}_limits": plan.limits[scope] for scope in LimitScope}
    return {"name": plan.name, **limits, "spend_limits": plan.spend_limits}
