"""Limits and usage, and rejected requests: `/v1/limits`, `/admin/.../limits`, `/admin/refusals`."""

from typing import Annotated

from fastapi import APIRouter, Depends, Query

from gateway.accounts.keys.service import is_key
from gateway.accounts.limits.schemas import LimitsReport, RefusalCounts, RefusalList
from gateway.accounts.limits.service import LimitReports, Since
from gateway.accounts.plans.service import plan_of
from gateway.accounts.projects.service import find_project
from gateway.accounts.shared.parameters import TenantId, text_filter
from gateway.accounts.tenants.service import find_tenant
from gateway.http.authorization import CanSeeEverything, requires
from gateway.http.services import made, provided
from gateway.platform.database.engine import Database
from gateway.platform.database.paging import find_record
from gateway.platform.database.tables import ApiKeyRow
from gateway.records.checks import check_known
from gateway.records.errors import NotFoundError, shown
from gateway.records.grants import defaults_of
from gateway.records.limits import Limits, LimitScope, SubjectLimits
from gateway.records.principal import Principal
from gateway.records.records import KeyRecord, Project, Tenant
from gateway.records.scopes import Scope

router = APIRouter(tags=["Limits"])
operators = APIRouter(tags=["Limits"])

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
    database: Annotated[Database, provided(Database)],
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
    async with database.reading() as transaction:
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
    return await reports.report(found, subjects)


@operators.get("/refusals", summary="Count rejected requests")
async def count_refusals(
    reports: Reports,
    _principal: CanSeeEverything,
    since: Annotated[
        Since, Query(description="The current hour and the 23 before, or day and 6 before; UTC.")
    ] = "24h",
    tenant: Annotated[str | None, text_filter("Only this tenant.")] = None,
) -> RefusalCounts:
    """Count the requests that all gateways rejected before any work, by tenant and error code.

    They appear within a second.
    """
    return await reports.refusals_of_tenants(since, tenant)
