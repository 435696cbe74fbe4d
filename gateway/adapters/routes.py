"""LoRA adapters of a tenant.

Tenants see and delete theirs at `/v1/adapters`. Operators do so, and register adapters, at
`/admin/tenants/{tenant_id}/adapters`.
"""

from typing import Annotated

from fastapi import APIRouter, Depends, Path

from gateway.accounts.shared import AfterId, CallerOfTenant, PageSize, any_tenant, own_tenant
from gateway.adapters.schemas import (
    AdapterBody,
    AdapterList,
    AdapterRegistration,
    DeletedAdapter,
    RegisteredAdapterBody,
    RegisteredAdapterList,
)
from gateway.adapters.service import AdapterService
from gateway.http.bounded_route import BoundedRoute
from gateway.http.services import made
from gateway.platform.database.paging import PageRequest
from gateway.records.scopes import Scope

_of_both = APIRouter(prefix="/adapters", tags=["Adapters"], route_class=BoundedRoute)
_of_customers = APIRouter(prefix="/adapters", tags=["Adapters"], route_class=BoundedRoute)
_of_operators = APIRouter(prefix="/adapters", tags=["Adapters"], route_class=BoundedRoute)


Adapters = Annotated[AdapterService, made(AdapterService.of)]
AdapterId = Annotated[str, Path(max_length=63, description="Id or name of the adapter.")]


@_of_customers.get("", summary="List adapters")
async def list_adapters(
    adapters: Adapters, caller: CallerOfTenant, after: AfterId = None, limit: PageSize = 20
) -> AdapterList:
    """List the adapters of the account, oldest first, without shared ones of others.

    All routes under `/v1/adapters` need the scope `keys` and a credential of the whole account.
    """
    return AdapterList.of(await adapters.page(caller.tenant_id, PageRequest(after, limit)))


@_of_both.get("/{adapter_id}", summary="Get an adapter")
async def get_adapter(
    adapters: Adapters, caller: CallerOfTenant, adapter_id: AdapterId
) -> AdapterBody:
    """Get an adapter with the state of its validation."""
    return AdapterBody.of(await adapters.get(caller.tenant_id, adapter_id))


@_of_both.delete("/{adapter_id}", summary="Delete an adapter")
async def delete_adapter(
    adapters: Adapters, caller: CallerOfTenant, adapter_id: AdapterId
) -> DeletedAdapter:
    """Delete an adapter. All gateways apply this within a second; admitted requests continue."""
    deleted = await adapters.delete(caller.tenant_id, adapter_id, actor=caller.actor)
    return DeletedAdapter(id=deleted.id)


@_of_operators.get("", summary="List adapters with their sources")
async def list_registered(
    adapters: Adapters, caller: CallerOfTenant, after: AfterId = None, limit: PageSize = 20
) -> RegisteredAdapterList:
    """List the adapters of a tenant, oldest first."""
    page = await adapters.page(caller.tenant_id, PageRequest(after, limit))
    return RegisteredAdapterList.of(page)


@_of_operators.post("", summary="Register an adapter")
async def register_adapter(
    adapters: Adapters, caller: CallerOfTenant, body: AdapterRegistration
) -> RegisteredAdapterBody:
    """Register an adapter. Background jobs validate its files and copy them to the file store.

    Its `state` becomes `ready` or `failed`. Later changes of the source have no effect.
    """
    registered = await adapters.register(caller.tenant_id, **body.model_dump(), actor=caller.actor)
    return RegisteredAdapterBody.of(registered)


customers = APIRouter(prefix="/v1", dependencies=[Depends(own_tenant(Scope.KEYS, of_tenant=True))])
customers.include_router(_of_both)
customers.include_router(_of_customers)

operators = APIRouter(prefix="/admin/tenants/{tenant_id}", dependencies=[Depends(any_tenant)])
operators.include_router(_of_both)
operators.include_router(_of_operators)
