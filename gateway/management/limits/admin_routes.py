"""Limits and usage of a tenant: `GET /admin/tenants/{tenant_id}/limits`."""

from collections.abc import Iterator, Mapping
from typing import Annotated

from fastapi import APIRouter, Query
from sqlalchemy.ext.asyncio import AsyncSession

from gateway.errors import NotFoundError, shown
from gateway.http.authorization import CanSeeEverything, Context
from gateway.management.keys.store import KeyStore
from gateway.management.limits.routes import report
from gateway.management.limits.schemas import LimitsReport
from gateway.management.plans.store import PlanStore
from gateway.management.projects.service import find_project
from gateway.management.shared.parameters import TenantId
from gateway.management.tenants.service import found_tenant
from gateway.management.tenants.store import TenantStore
from gateway.tenancy.checks import check_known
from gateway.tenancy.limits import Limits, LimitScope, LimitValues, SubjectLimits
from gateway.tenancy.records import Tenant

router = APIRouter(tags=["Limits"])

_Holders = Mapping[LimitScope, tuple[str, LimitValues]]


@router.get("/tenants/{tenant_id}/limits", summary="Get a tenant's limits and their usage")
async def get_limits(
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
        found = await _tenant(transaction, tenant_id)
        holders = await _holders(transaction, found, project=project, key=key)
        plan = None if found.plan_id is None else await PlanStore(transaction).get(found.plan_id)
    defaults = {} if plan is None else plan.limits
    return await report(context, found, list(_subjects(holders, defaults)))


async def _tenant(transaction: AsyncSession, tenant_id: str) -> Tenant:
    check_known(tenant_id, "tenant")
    return found_tenant(await TenantStore(transaction).get(tenant_id), tenant_id)


async def _holders(
    transaction: AsyncSession, tenant: Tenant, *, project: str | None, key: str | None
) -> _Holders:
    holders: dict[LimitScope, tuple[str, LimitValues]] = {
        LimitScope.TENANT: (tenant.id, tenant.limits)
    }
    if project is not None:
        found = await find_project(transaction, tenant.id, project)
        holders[LimitScope.PROJECT] = (found.id, found.limits)
    if key is not None:
        check_known(key, "key")
        record = await KeyStore(transaction).find(tenant.id, key)
        if record is None:
            raise NotFoundError(f"The tenant {shown(tenant.id)} has no key {shown(key)}.")
        holders[LimitScope.KEY] = (record.id, record.limits)
    return holders


def _subjects(
    holders: _Holders, defaults: Mapping[LimitScope, LimitValues]
) -> Iterator[SubjectLimits]:
    """Yield the limits of key, project and tenant, in this order."""
    for scope in LimitScope:
        if scope in holders:
            id_, own = holders[scope]
            yield SubjectLimits(scope, id_, Limits.from_values(own, defaults.get(scope, {})))
