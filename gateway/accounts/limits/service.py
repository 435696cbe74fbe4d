"""Reports of limits, of their usage, and of rejected requests."""

from collections.abc import Sequence
from typing import Final, Literal

from gateway.accounts.limits.schemas import (
    CreditsBody,
    LimitsReport,
    RefusalBody,
    RefusalCount,
    RefusalCounts,
    ScopeBody,
    is_seed_needed,
)
from gateway.accounts.tenants.service import find_tenant
from gateway.limits.period_counts import Period, PeriodCounts
from gateway.limits.refusal_log import Refusals
from gateway.limits.replies import SubjectStatus
from gateway.limits.seeding import Seeder
from gateway.limits.storage import Storage
from gateway.limits.store import QuotaStore
from gateway.platform.database.batch_tokens import tokens_in_batches
from gateway.platform.database.engine import Database
from gateway.records.limits import LimitScope, SubjectLimits
from gateway.records.principal import Principal
from gateway.records.records import Billing, Tenant
from gateway.records.scopes import Scope

MOST_ROWS: Final = 1000
Since = Literal["24h", "7d"]
PERIODS: Final[dict[str, Period]] = {"24h": Period.HOUR, "7d": Period.DAY}


class LimitReports:
    """Limits, usage and rejections. All methods raise RedisError and StoreUnavailableError."""

    def __init__(
        self,
        database: Database,
        quotas: QuotaStore,
        seeder: Seeder,
        storage: Storage,
        refusals: Refusals,
        counts: PeriodCounts,
    ) -> None:
        self._database = database
        self._quotas = quotas
        self._seeder = seeder
        self._storage = storage
        self._refusals = refusals
        self._counts = counts

    async def refusals_of_tenants(self, since: Since, tenant: str | None) -> RefusalCounts:
        """Count the requests that all gateways rejected, by tenant and error code."""
        found = await self._counts.refusals(PERIODS[since], tenant_id=tenant)
        rows = found.counts.most_common(MOST_ROWS)
        return RefusalCounts(
            data=[
                RefusalCount(
                    tenant=tenant or (names[0] if len(names) > 1 and names[0] else None),
                    code=names[-1],
                    requests=count,
                )
                for names, count in rows
            ],
            is_complete=found.is_complete and len(found.counts) <= MOST_ROWS,
        )

    async def own_refusals(self, principal: Principal) -> list[RefusalBody]:
        """Return the rejections that a credential may see."""
        sees_others = Scope.USAGE in principal.scopes
        found = await self._refusals.latest(
            principal.tenant_id,
            credential_id=None if sees_others else principal.credential_id,
            project_id=principal.project_id,
        )
        return [RefusalBody.of(each) for each in found]

    async def own_limits(self, principal: Principal) -> LimitsReport:
        """Return the limits and usage that a credential may see."""
        async with self._database.reading() as transaction:
            tenant = await find_tenant(transaction, principal.tenant_id)
        visible = [each for each in principal.limits if principal.sees_use_of(each.scope)]
        return await self.report(tenant, visible)

    async def report(self, tenant: Tenant, subjects: Sequence[SubjectLimits]) -> LimitsReport:
        """Return the usage of these limits; with the tenant's own limits, also its credits."""
        has_tenant = any(each.scope is LimitScope.TENANT for each in subjects)
        is_prepaid = has_tenant and tenant.billing is Billing.PREPAID
        statuses = await self._statuses(tenant.id, subjects, is_prepaid=is_prepaid)
        stored = await self._storage.used(tenant.id, subjects)
        async with self._database.reading() as transaction:
            in_batches = [
                await tokens_in_batches(transaction, tenant.id, each.scope, each.id)
                for each in subjects
            ]
        subjects = [self._storage.in_force(each) for each in subjects]
        columns = zip(subjects, statuses, stored, in_batches, strict=True)
        return LimitsReport(
            tenant=tenant.id,
            plan=tenant.plan_id,
            service_tier=tenant.service_tier,
            billing=tenant.billing,
            scopes=[ScopeBody.of(*each) for each in columns],
            credits=_credits(statuses) if is_prepaid else None,
        )

    async def _statuses(
        self, tenant_id: str, subjects: Sequence[SubjectLimits], *, is_prepaid: bool
    ) -> list[SubjectStatus]:
        """Return the usage, first derived from the ledger where Redis lacks it."""
        if not subjects:
            return []
        statuses = await self._quotas.status(tenant_id, subjects)
        unknown = [
            subject
            for subject, status in zip(subjects, statuses, strict=True)
            if is_seed_needed(subject, status, is_prepaid=is_prepaid)
        ]
        if not unknown:
            return statuses
        await self._seeder.seed(tenant_id, unknown)
        return await self._quotas.status(tenant_id, subjects)


def _credits(statuses: Sequence[SubjectStatus]) -> CreditsBody:
    # The tenant is the last of the holders.
    return CreditsBody(remaining_micros=statuses[-1].credit_micros or 0)
