"""Limits and usage, and rejected requests: `/v1/limits`, `/admin/.../limits`, `/admin/refusals`."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Final, Literal, Self

from fastapi import APIRouter, Depends, Query
from pydantic import BaseModel, BeforeValidator, Field

from contract.tier import ServiceTier
from gateway.accounts.keys.service import is_key
from gateway.accounts.plans.service import plan_of
from gateway.accounts.projects.service import find_project
from gateway.accounts.routes_common import RecordBody, TenantId, text_filter
from gateway.accounts.spend_limits import SpendLimitBody, uses_of
from gateway.accounts.tenants.service import find_tenant
from gateway.http.authorization import operators_router, requires
from gateway.http.services import made
from gateway.limits.counters import DAY_MS, day_start_ms
from gateway.limits.refusal_log import Period, PeriodCounts, Refusal, Refusals
from gateway.limits.replies import SubjectStatus
from gateway.limits.seeding import Seeder
from gateway.limits.stored_bytes import Storage
from gateway.platform.database.engine import Database
from gateway.platform.database.holders import tokens_in_batches
from gateway.platform.database.paging import find_record
from gateway.platform.database.tables import ApiKeyRow
from gateway.records.checks import check_known
from gateway.records.errors import NotFoundError, shown
from gateway.records.grants import defaults_of
from gateway.records.limits import RESERVED_LIMITS, LimitName, Limits, LimitScope, SubjectLimits
from gateway.records.principal import Principal
from gateway.records.records import Billing, KeyRecord, Project, Tenant
from gateway.records.scopes import Scope
from gateway.records.times import next_month, to_time

_AT_ANY_TIME = frozenset(
    {
        LimitName.CONCURRENT_REQUESTS,
        LimitName.STORED_BYTES,
        LimitName.BATCH_TOKENS,
        LimitName.MODEL_SHARE,
    }
)


class LimitBody(BaseModel):
    """One limit."""

    limit: int | None = Field(description="Null: no limit, and usage is not counted.")
    used: int | None = Field(
        description="Usage of ended requests, plus the maximum usage of running ones. Null for "
        "`model_share_percent`, which every engine counts for itself."
    )
    remaining: int | None
    resets_at: datetime | None = Field(
        description="When the day or month ends, or the oldest usage of the minute expires. Null "
        "for limits that count no period, and if the minute has no usage."
    )


class ScopeBody(BaseModel):
    """The holder of limits and its limits by name."""

    scope: LimitScope
    id: str
    limits: dict[LimitName, LimitBody]

    @classmethod
    def of(
        cls, subject: SubjectLimits, status: SubjectStatus, stored_bytes: int, batch_tokens: int
    ) -> Self:
        """Return the response body of one holder's limits."""
        counted = {LimitName.STORED_BYTES: stored_bytes, LimitName.BATCH_TOKENS: batch_tokens}
        used = {name: status.used(name) for name in RESERVED_LIMITS} | counted
        given = subject.limits
        limits = {n: _limit(n, given.get(n), used.get(n), status) for n in LimitName}
        return cls(scope=subject.scope, id=subject.id, limits=limits)


class CreditsBody(BaseModel):
    """Remaining credit of a prepaid tenant."""

    remaining_micros: int = Field(
        description="Micro-dollars, minus the maximum cost of running requests."
    )


class LimitsReport(BaseModel):
    """All limits that apply, and their current usage."""

    object: Literal["limits"] = "limits"
    tenant: str
    plan: str | None = Field(description="Plan whose limits apply where no own limit is set.")
    service_tier: ServiceTier = Field(description="Service tier of requests that specify none.")
    billing: Billing
    scopes: list[ScopeBody] = Field(description="Key, project and tenant; a request must meet all.")
    credits: CreditsBody | None = Field(description="Null unless the tenant is prepaid.")
    spend_limits: list[SpendLimitBody] = Field(
        default_factory=list, description="Those that apply to the caller, if it may see them."
    )


class RefusalBody(RecordBody):
    """Equal rejections by a limit within a second."""

    object: Literal["refusal"] = "refusal"
    at: Annotated[datetime, BeforeValidator(to_time)] = Field(
        validation_alias="at_ms", description="When the first one was sent."
    )
    key: str = Field(
        validation_alias="credential_id", description="Id of the key, or `jwt:SUBJECT`."
    )
    project: str | None = Field(validation_alias="project_id")
    model: str
    code: str = Field(description="Code of the error.")
    limit: str
    scope: str = Field(description="Holder of the limit: key, project or tenant.")
    message: str = Field(description="Message of the first error.")
    times: int


class RefusalList(BaseModel):
    """The latest rejections by limits, newest first."""

    object: Literal["list"] = "list"
    data: list[RefusalBody]


class RefusalCount(BaseModel):
    """How many requests of a tenant were rejected with one error code."""

    tenant: str | None = Field(description="Null for requests without a valid credential.")
    code: str = Field(description="Code of the error.")
    requests: int


class RefusalCounts(BaseModel):
    """Rejected requests, the largest numbers first."""

    object: Literal["list"] = "list"
    data: list[RefusalCount]
    is_complete: bool = Field(
        description="False if small numbers are missing: of each hour or day, the 1,000 largest "
        "are summed, and the 1,000 largest sums are listed."
    )


def _limit(
    name: LimitName, limit: int | None, used: int | None, status: SubjectStatus
) -> LimitBody:
    if limit is None or used is None:
        return LimitBody(limit=limit, used=None, remaining=None, resets_at=None)
    resets_at = _resets_at(name, status)
    return LimitBody(limit=limit, used=used, remaining=max(limit - used, 0), resets_at=resets_at)


def _resets_at(name: LimitName, status: SubjectStatus) -> datetime | None:
    now_ms = status.now_ms
    if name.endswith("per_minute"):
        wait_ms = status.minute_reset_ms
        return None if wait_ms is None else to_time(now_ms + wait_ms)
    if name in _AT_ANY_TIME:
        return None
    if name is LimitName.BUDGET:
        return next_month(to_time(now_ms))
    return to_time(day_start_ms(now_ms) + DAY_MS)


MOST_ROWS: Final = 1000
Since = Literal["24h", "7d"]
PERIODS: Final[dict[str, Period]] = {"24h": Period.HOUR, "7d": Period.DAY}


@dataclass(eq=False)
class LimitReports:
    """Limits, usage and rejections. All methods raise RedisError and StoreUnavailableError."""

    _database: Database
    _seeder: Seeder
    _storage: Storage
    _refusals: Refusals
    _counts: PeriodCounts

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
        """Return the rejections by limits that a credential may see."""
        found = await self.own_rejections(principal, by_limits=True)
        return [RefusalBody.of(each) for each in found]

    async def own_rejections(self, principal: Principal, *, by_limits: bool) -> list[Refusal]:
        """Return the rejections by limits, or all others, that a credential may see."""
        sees_others = Scope.USAGE in principal.scopes
        return await self._refusals.latest(
            principal.tenant_id,
            credential_id=None if sees_others else principal.credential_id,
            project_id=principal.project_id,
            by_limits=by_limits,
        )

    async def own_limits(self, principal: Principal) -> LimitsReport:
        """Return the limits and usage that a credential may see."""
        async with self._database.reading() as transaction:
            tenant = await find_tenant(transaction, principal.tenant_id)
        visible = [each for each in principal.limits if principal.sees_use_of(each.scope)]
        report = await self.report(tenant, visible)
        shown = [each for each in principal.spend_limits if principal.sees_use_of(each.shown_scope)]
        uses = await uses_of(self._seeder, tenant.id, shown)
        report.spend_limits = [SpendLimitBody.of_use(each) for each in uses]
        return report

    async def of_tenant(
        self, tenant_id: str, *, project: str | None = None, key: str | None = None
    ) -> LimitsReport:
        """Return the limits of a tenant, and of one of its projects and one of its keys.

        Raises NotFoundError.
        """
        async with self._database.reading() as transaction:
            found = await find_tenant(transaction, tenant_id)
            plan = await plan_of(transaction, tenant_id)
            holders: dict[LimitScope, KeyRecord | Project | Tenant] = {LimitScope.TENANT: found}
            if project is not None:
                holders[LimitScope.PROJECT] = await find_project(transaction, found.id, project)
            if key is not None:
                check_known(key, "key")
                record = await find_record(transaction, ApiKeyRow, is_key(found.id, key))
                if record is None:
                    raise NotFoundError(f"The tenant {shown(found.id)} has no key {shown(key)}.")
                holders[LimitScope.KEY] = record
        subjects = [
            SubjectLimits(scope, each.id, Limits.from_values(each.limits, defaults_of(plan, scope)))
            for scope in LimitScope  # Key, project and tenant, in this order.
            if (each := holders.get(scope)) is not None
        ]
        return await self.report(found, subjects)

    async def of_keys(self, tenant_id: str, keys: Sequence[KeyRecord]) -> list[Limits]:
        """Return the limits that apply to keys of a tenant: their own, else those of its plan."""
        async with self._database.reading() as transaction:
            defaults = defaults_of(await plan_of(transaction, tenant_id), LimitScope.KEY)
        return [Limits.from_values(each.limits, defaults) for each in keys]

    async def report(self, tenant: Tenant, subjects: Sequence[SubjectLimits]) -> LimitsReport:
        """Return the usage of these limits; with the tenant's own limits, also its credits."""
        has_tenant = any(each.scope is LimitScope.TENANT for each in subjects)
        is_prepaid = has_tenant and tenant.billing is Billing.PREPAID
        statuses = await self._seeder.statuses(tenant.id, subjects, is_prepaid=is_prepaid)
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
            # The tenant is the last of the holders.
            credits=CreditsBody(remaining_micros=statuses[-1].credit_micros or 0)
            if is_prepaid
            else None,
        )


router = APIRouter(tags=["Limits"])
operators = operators_router("Limits")

Reports = Annotated[LimitReports, made(LimitReports)]
AnyCaller = Annotated[Principal, Depends(requires(*Scope))]


@router.get("/v1/limits", summary="Get your limits and their usage")
async def get_limits(reports: Reports, principal: AnyCaller) -> LimitsReport:
    """Get the limits of the caller. Any valid credential gets its own limits.

    With the scope `usage`, the report adds those of its project and, unless it is a project
    credential, those of its tenant with the remaining prepaid credits.
    """
    return await reports.own_limits(principal)


@router.get("/v1/limits/refusals", summary="List requests that a limit rejected")
async def list_refusals(reports: Reports, principal: AnyCaller) -> RefusalList:
    """List up to 100 rejections of the last seven days, newest first.

    With the scope `usage` you see those of your whole tenant, or of your project with a project
    credential. Else you see those of the key itself. They appear within a second.
    """
    return RefusalList(data=await reports.own_refusals(principal))


@operators.get(
    "/tenants/{tenant_id}/limits",
    name="get_limits",
    summary="Get a tenant's limits and their usage",
)
async def get_limits_of(
    reports: Reports,
    tenant_id: TenantId,
    project: Annotated[
        str | None, Query(max_length=63, description="Include the limits of this project.")
    ] = None,
    key: Annotated[
        str | None, Query(max_length=63, description="Include the limits of this key.")
    ] = None,
) -> LimitsReport:
    """Get the limits of the tenant and, if given, of one of its projects and one of its keys."""
    return await reports.of_tenant(tenant_id, project=project, key=key)


@operators.get("/refusals", summary="Count rejected requests")
async def count_refusals(
    reports: Reports,
    since: Annotated[
        Since, Query(description="The current hour and the 23 before, or day and 6 before; UTC.")
    ] = "24h",
    tenant: Annotated[str | None, text_filter("Only this tenant.")] = None,
) -> RefusalCounts:
    """Count the requests that all gateways rejected before any work, by tenant and error code.

    They appear within a second.
    """
    return await reports.refusals_of_tenants(since, tenant)
