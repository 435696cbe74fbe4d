"""Limits and usage of the caller: `GET /v1/limits`."""

from collections.abc import Sequence
from typing import Annotated

from fastapi import APIRouter, Depends

from gateway.auth.principal import Principal
from gateway.database.batch_tokens import tokens_in_batches
from gateway.http.authorization import Context, requires
from gateway.http.context import ProcessContext
from gateway.management.limits.schemas import (
    CreditsBody,
    LimitsReport,
    RefusalBody,
    RefusalList,
    ScopeBody,
    is_seed_needed,
)
from gateway.management.tenants.service import TenantService
from gateway.quota.replies import SubjectStatus
from gateway.tenancy.limits import LimitScope, SubjectLimits
from gateway.tenancy.records import Billing, Tenant
from gateway.tenancy.scopes import Scope

router = APIRouter(tags=["Limits"])

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
