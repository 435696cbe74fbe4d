"""Data for budget alerts: subscribed tenants, holders of budgets, and their cost so far."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from gateway.platform.database.tables import (
    ApiKeyRow,
    PlanRow,
    ProjectRow,
    RollupPeriod,
    RollupRow,
    TenantRow,
    WebhookRow,
)
from gateway.records.limits import Limits, LimitScope, LimitValues, SubjectLimits, subject_of
from gateway.records.records import Plan, ProjectStatus, Tenant, Webhook


class MonthlyCosts(Protocol):
    """Source of monthly costs for alerts."""

    async def costs(
        self, transaction: AsyncSession, tenant_id: str, since: datetime
    ) -> Mapping[str, int]:
        """Return the cost of a tenant, its projects and its keys since then.

        The keys of the result are subjects such as `t:acme`; costs are in micro-dollars.
        """


class RollupCosts:
    """Daily sums of the ledger, which lag it by seconds but have few rows."""

    async def costs(
        self, transaction: AsyncSession, tenant_id: str, since: datetime
    ) -> Mapping[str, int]:
        """Return the cost by subject."""
        rows = await transaction.execute(
            select(RollupRow.project_id, RollupRow.credential_id, func.sum(RollupRow.cost_micros))
            .where(
                RollupRow.tenant_id == tenant_id,
                RollupRow.period == RollupPeriod.DAY,
                RollupRow.start_at >= since,
            )
            .group_by(RollupRow.project_id, RollupRow.credential_id)
        )
        costs = Counter[str]()
        for project_id, credential_id, cost in rows:
            costs[subject_of(LimitScope.TENANT, tenant_id)] += int(cost)
            costs[subject_of(LimitScope.KEY, credential_id)] += int(cost)
            if project_id:
                costs[subject_of(LimitScope.PROJECT, project_id)] += int(cost)
        return costs


@dataclass(frozen=True, slots=True)
class Watched:
    """A tenant with webhooks."""

    tenant: Tenant
    plan: Plan | None
    webhooks: list[Webhook]


class AlertStore:
    """Reads the data for alerts, within one transaction."""

    def __init__(self, transaction: AsyncSession) -> None:
        self._transaction = transaction

    async def watched(self) -> list[Watched]:
        """Return the tenants that have webhooks."""
        rows = await self._transaction.execute(
            select(TenantRow, PlanRow, WebhookRow)
            .join(WebhookRow, WebhookRow.tenant_id == TenantRow.id)
            .outerjoin(PlanRow, PlanRow.id == TenantRow.plan_id)
            .where(WebhookRow.removed_at.is_(None))
            .order_by(TenantRow.id, WebhookRow.id)
        )
        found: dict[str, Watched] = {}
        row: Any
        for row in rows:
            tenant, plan, webhook = row
            known = None if plan is None else plan.to_record()
            watched = found.setdefault(tenant.id, Watched(tenant.to_record(), known, []))
            watched.webhooks.append(webhook.to_record())
        return list(found.values())

    async def holders(self, watched: Watched) -> list[SubjectLimits]:
        """Return the limits of a tenant, of its projects and of its keys in use."""
        tenant_id = watched.tenant.id
        projects = await self._transaction.scalars(
            select(ProjectRow)
            .where(ProjectRow.tenant_id == tenant_id, ProjectRow.status == ProjectStatus.ACTIVE)
            .order_by(ProjectRow.id)
        )
        keys = await self._transaction.scalars(
            select(ApiKeyRow)
            .where(ApiKeyRow.tenant_id == tenant_id, ApiKeyRow.revoked_at.is_(None))
            .order_by(ApiKeyRow.id)
        )
        return [
            *_limits(LimitScope.TENANT, [(tenant_id, watched.tenant.limits)], watched.plan),
            *_limits(LimitScope.PROJECT, ((row.id, row.limits) for row in projects), watched.plan),
            *_limits(LimitScope.KEY, ((row.id, row.limits) for row in keys), watched.plan),
        ]


def _limits(
    scope: LimitScope, holders: Iterable[tuple[str, LimitValues]], plan: Plan | None
) -> list[SubjectLimits]:
    defaults = plan.limits[scope] if plan else {}
    return [SubjectLimits(scope, id_, Limits.from_values(own, defaults)) for id_, own in holders]
