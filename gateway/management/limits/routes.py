"""Limits and usage, and rejected requests: `/v1/limits`, `/admin/.../limits`, `/admin/refusals`."""

from collections.abc import Sequence
from typing import Annotated, Final, Literal

from fastapi import APIRouter, Depends, Query

from gateway.auth.principal import Principal
from gateway.database.batch_tokens import tokens_in_batches
from gateway.database.paging import find_record
from gateway.database.tables import ApiKeyRow
from gateway.errors import NotFoundError, shown
from gateway.http.authorization import CanSeeEverything, Context, requires
from gateway.http.context import ProcessContext
from gateway.management.keys.service import is_key
from gateway.management.limits.schemas import (
    CreditsBody,
    LimitsReport,
    RefusalBody,
    RefusalCount,
    RefusalCounts,
    RefusalList,
    ScopeBody,
    is_seed_needed,
)
from gateway.management.plans.service import plan_of
from gateway.management.projects.service import find_project
from gateway.management.shared.parameters import TenantId, text_filter
from gateway.management.tenants.service import TenantService, find_tenant
from gateway.quota.period_counts import Period
from gateway.quota.replies import SubjectStatus
from gateway.tenancy.checks import check_known
from gateway.tenancy.grants import defaults_of
from gateway.tenancy.limits import Limits, LimitScope, SubjectLimits
from gateway.tenancy.records import Billing, KeyRecord, Project, Tenant
from gateway.tenancy.scopes import Scope

router = APIRouter(tags=["Limits"])
operators = APIRouter(tags=["Limits"])

MOST_ROWS: Final = 1000
Since = Literal["24h", "7d"]
PERIODS: Final[dict[str, Period]] = {"24h": Period.HOUR, "7d": Period.DAY}

AnyCaller = Annotated[Principal, Depends(requires(*Scope))]


@router.get("/v1/limits", summary="Get your limits and their usage")
async def get_limits(context: Context, principal: AnyCaller) -> LimitsReport:
    """Get the limits of the caller. Any valid credential gets its own limits.

    With the scope `usage`, the report adds those of its project and, unless it is a project
    credential, those of its tenant with the remaining prepaid credits.
    """
    return await own_limits(context, principal)


@router.get("/v1/limits/refusals", summary="List requests that a limit rejected")
async def list_refusals(context: Context, principal: AnyCaller) -> RefusalList:
    """List up to 100 rejections of the last seven days, newest first.

    With the scope `usage` you see those of your whole tenant, or of your project with a project
    credential. Else you see those of the key itself. They appear within a second.
    """
    return RefusalList(data=await own_refusals(context, principal))


@operators.get(
    "/tenants/{tenant_id}/limits",
    name="get_limits",
    summary="Get a tenant's limits and their usage",
)
async def get_limits_of(
    context: Context,
    _principal: CanSeeEverything,
    tenant_id: TenantId,
    project: Annotated[
        str | None, Query(max_length=63, description="Include the limits of this project.")
    ] = None,
    key: Annotated[
        str | None, Query(max_length=63, description="Include the limits of this key.")
    ] = None,
) -> LimitsReport:
    """Get the limits of the tenant and, if given, of one of its projects and one of its keys."""
    async with context.database.reading() as transaction:
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
    return await report(context, found, subjects)


@operators.get("/refusals", summary="Count rejected requests")
async def count_refusals(
    context: Context,
    _principal: CanSeeEverything,
    since: Annotated[
        Since, Query(description="The current hour and the 23 before, or day and 6 before; UTC.")
    ] = "24h",
    tenant: Annotated[str | None, text_filter("Only this tenant.")] = None,
) -> RefusalCounts:
    """Count the requests that all gateways rejected before any work, by tenant and error code.

    They appear within a second.
    """
    return await refusal_counts(context, since, tenant)


async def refusal_counts(
    context: ProcessContext, since: Since, tenant: str | None
) -> RefusalCounts:
    """Return the numbers. Raises RedisError."""
    found = await context.counts.refusals(PERIODS[since], tenant_id=tenant)
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


async def own_refusals(context: ProcessContext, principal: Principal) -> list[RefusalBody]:
    """Return the rejections that a credential may see. Raises RedisError."""
    sees_others = Scope.USAGE in principal.scopes
    found = await context.refusals.latest(
        principal.tenant_id,
        credential_id=None if sees_others else principal.credential_id,
        project_id=principal.project_id,
    )
    return [RefusalBody.of(each) for each in found]


async def own_limits(context: ProcessContext, principal: Principal) -> LimitsReport:
    """Return the limits and usage that a credential may see. Raises the errors of `report`."""
    tenant = await TenantService(context.database, context.announcer).get(principal.tenant_id)
    visible = [each for each in principal.limits if principal.sees_use_of(each.scope)]
    return await report(context, tenant, visible)


async def report(
    context: ProcessContext, tenant: Tenant, subjects: Sequence[SubjectLimits]
) -> LimitsReport:
    """Return the usage of these limits, and the tenant's credits if its own limits are included.

    Raises StoreUnavailableError and RedisError.
    """
    has_tenant = any(each.scope is LimitScope.TENANT for each in subjects)
    is_prepaid = has_tenant and tenant.billing is Billing.PREPAID
    statuses = await _statuses(context, tenant.id, subjects, is_prepaid=is_prepaid)
    stored = await context.storage.used(tenant.id, subjects)
    async with context.database.reading() as transaction:
        in_batches = [
            await tokens_in_batches(transaction, tenant.id, each.scope, each.id)
            for each in subjects
        ]
    subjects = [context.storage.in_force(each) for each in subjects]
    columns = zip(subjects, statuses, stored, in_batches, strict=True)
    return LimitsReport(
        tenant=tenant.id,
        plan=tenant.plan_id,
        service_tier=tenant.service_tier,
        billing=tenant.billing,
        scopes=[ScopeBody.of(*each) for each in columns],
        credits=_credits(statuses) if is_prepaid else None,
    )


def _credits(statuses: Sequence[SubjectStatus]) -> CreditsBody:
    # The tenant is the last of the holders.
    return CreditsBody(remaining_micros=statuses[-1].credit_micros or 0)


async def _statuses(
    context: ProcessContext, tenant_id: str, subjects: Sequence[SubjectLimits], *, is_prepaid: bool
) -> list[SubjectStatus]:
    """Return the usage, first derived from the ledger where Redis lacks it."""
    if not subjects:
        return []
    statuses = await context.quotas.status(tenant_id, subjects)
    unknown = [
        subject
        for subject, status in zip(subjects, statuses, strict=True)
        if is_seed_needed(subject, status, is_prepaid=is_prepaid)
    ]
    if not unknown:
        return statuses
    await context.seeder.seed(tenant_id, unknown)
    return await context.quotas.status(tenant_id, subjects)
