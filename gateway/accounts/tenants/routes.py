"""Tenants, for operators: `/admin/tenants`."""

from typing import Annotated

from fastapi import APIRouter

from gateway.accounts.shared.parameters import AfterId, PageSize, TenantId, text_filter
from gateway.accounts.tenants.schemas import TenantBody, TenantChange, TenantCreation, TenantList
from gateway.accounts.tenants.service import TenantService
from gateway.http.authorization import CanAdminister, CanSeeEverything
from gateway.http.bounded_route import BoundedRoute
from gateway.http.services import made
from gateway.platform.database.paging import PageRequest

router = APIRouter(prefix="/tenants", tags=["Tenants"], route_class=BoundedRoute)


Tenants = Annotated[TenantService, made(TenantService)]


@router.get("", summary="List all tenants")
async def list_tenants(
    tenants: Tenants,
    _principal: CanSeeEverything,
    *,
    search: Annotated[
        str | None, text_filter("Only tenants whose id or name contains this text.")
    ] = None,
    after: AfterId = None,
    limit: PageSize = 20,
) -> TenantList:
    """List tenants, oldest first."""
    return TenantList.of(await tenants.page(PageRequest(after, limit), text=search or ""))


@router.post("", summary="Create a tenant")
async def create_tenant(
    tenants: Tenants, principal: CanAdminister, body: TenantCreation
) -> TenantBody:
    """Create a tenant, which is active at once."""
    options = body.options()
    created = await tenants.create(
        options.pop("name"), tenant_id=options.pop("id", None), actor=principal.actor, **options
    )
    return TenantBody.of(created)


@router.get("/{tenant_id}", summary="Get a tenant")
async def get_tenant(
    tenants: Tenants, _principal: CanSeeEverything, tenant_id: TenantId
) -> TenantBody:
    """Get a tenant with all its options."""
    return TenantBody.of(await tenants.get(tenant_id))


@router.patch("/{tenant_id}", summary="Update a tenant")
async def change_tenant(
    tenants: Tenants, principal: CanAdminister, tenant_id: TenantId, body: TenantChange
) -> TenantBody:
    """Change the fields that the body contains. All gateways apply the change within a second."""
    changed = await tenants.update(tenant_id, actor=principal.actor, **body.options())
    return TenantBody.of(changed)


@router.post("/{tenant_id}:suspend", summary="Suspend a tenant")
async def suspend_tenant(
    tenants: Tenants, principal: CanAdminister, tenant_id: TenantId
) -> TenantBody:
    """Suspend the tenant on all gateways within a second. Running requests continue."""
    return TenantBody.of(await tenants.suspend(tenant_id, actor=principal.actor))


@router.post("/{tenant_id}:activate", summary="Activate a suspended tenant")
async def activate_tenant(
    tenants: Tenants, principal: CanAdminister, tenant_id: TenantId
) -> TenantBody:
    """Activate the tenant on all gateways within a second."""
    return TenantBody.of(await tenants.activate(tenant_id, actor=principal.actor))
