"""`GET /v1/limits`: what the caller may use, and what is used of it."""

from collections.abc import Sequence
from typing import Annotated

from fastapi import APIRouter, Depends

from gateway.accounts.limits import SubjectLimits
from gateway.accounts.records import Billing, Tenant
from gateway.accounts.scopes import Scope
from gateway.accounts.tenant_service import TenantService
from gateway.api.call import Context, requires
from gateway.api.context import ProcessContext
from gateway.api.limit_bodies import CreditsBody, LimitsReport, ScopeBody, is_seed_needed
from gateway.auth.principal import Principal
from gateway.quota.answers import SubjectStatus

router = APIRouter(tags=["Limits"])

AnyCaller = Annotated[Principal, Depends(requires(*Scope))]


@router.get("/v1/limits", summary="Show your limits and what is used of them")
async def get_limits(context: Context, principal: AnyCaller) -> LimitsReport:
    """For any valid credential: its own limits, those of its project and those of its tenant."""
    tenant = await TenantService(context.database, context.announcer).get(principal.tenant_id)
    return await report(context, tenant, principal.limits)


async def report(
    context: ProcessContext, tenant: Tenant, subjects: Sequence[SubjectLimits]
) -> LimitsReport:
    """Return what is used of these limits, of which the tenant's are the last.

    Raises StoreUnavailableError and RedisError.
    """
    is_prepaid = tenant.billing is Billing.PREPAID
    statuses = await _statuses(context, tenant.id, subjects, is_prepaid=is_prepaid)
    credit = statuses[-1].credit_micros
    return LimitsReport(
        tenant=tenant.id,
        plan=tenant.plan_id,
        service_tier=tenant.service_tier,
        billing=tenant.billing,
        scopes=[ScopeBody.of(*pair) for pair in zip(subjects, statuses, strict=True)],
        credits=CreditsBody(remaining_micros=credit or 0) if is_prepaid else None,
    )


async def _statuses(
    context: ProcessContext, tenant_id: str, subjects: Sequence[SubjectLimits], *, is_prepaid: bool
) -> list[SubjectStatus]:
    """Return what is used, derived from the ledger first where Redis does not know it."""
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
