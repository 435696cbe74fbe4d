"""LoRA adapters of a tenant.

Tenants see and delete theirs at `/v1/adapters`. Operators do so, and register adapters, at
`/admin/tenants/{tenant_id}/adapters`.
"""

from datetime import datetime
from typing import Annotated, Literal

from fastapi import Path
from pydantic import BaseModel, Field

from gateway.accounts.routes_common import (
    ListBody,
    Name,
    OfTenant,
    RecordBody,
    RequestBody,
    TenantRouter,
    WantedPage,
    own_tenant,
)
from gateway.adapters.service import AdapterService
from gateway.http.services import made
from gateway.platform.database.paging import Page
from gateway.records.adapters import Adapter, AdapterState
from gateway.records.scopes import Scope


class AdapterRegistration(RequestBody):
    """An adapter to register."""

    name: str = Field(
        min_length=1,
        max_length=63,
        description="Selects the adapter as a model, alone or as `BASE_MODEL:NAME`.",
    )
    base_model: Name = Field(description="Id under which workers announce the base model.")
    source: str = Field(
        min_length=1,
        max_length=1000,
        description="Folder of the machines that run `sluice jobs`, or `s3://BUCKET/PREFIX`, with "
        "`adapter_config.json` and `adapter_model.safetensors`.",
    )
    is_shared: bool = Field(False, strict=True, description="Whether every tenant may use it.")


class AdapterBody(RecordBody):
    """A LoRA adapter of a tenant."""

    object: Literal["adapter"] = "adapter"
    id: str
    tenant_id: str
    name: str
    base_model: str
    is_shared: bool = Field(description="Whether every tenant may use it.")
    state: AdapterState
    reason: str = Field(description="Why it failed, or why its validation is being repeated.")
    sha256: str = Field(description="Identifies its files; empty until they are checked.")
    rank: int
    target_modules: list[str]
    size: int = Field(description="Bytes of its files.")
    created_at: datetime


class RegisteredAdapterBody(AdapterBody):
    """A LoRA adapter with its source, for operators."""

    source: str = Field(description="Where its files came from.")


class DeletedAdapter(BaseModel):
    """A deleted adapter."""

    object: Literal["adapter.deleted"] = "adapter.deleted"
    id: str
    deleted: Literal[True] = True


router = TenantRouter("/adapters", "Adapters", own_tenant(Scope.KEYS, of_tenant=True))

Adapters = Annotated[AdapterService, made(AdapterService.of)]
AdapterId = Annotated[str, Path(max_length=63, description="Id or name of the adapter.")]


@router.of_customers.get("", summary="List adapters", response_model=ListBody[AdapterBody])
async def list_adapters(adapters: Adapters, caller: OfTenant, wanted: WantedPage) -> Page[Adapter]:
    """List the adapters of the account, oldest first, without shared ones of others.

    All routes under `/v1/adapters` need the scope `keys` and a credential of the whole account.
    """
    return await adapters.page(caller.tenant_id, wanted)


@router.get("/{adapter_id}", summary="Get an adapter", response_model=AdapterBody)
async def get_adapter(adapters: Adapters, caller: OfTenant, adapter_id: AdapterId) -> Adapter:
    """Get an adapter with the state of its validation."""
    return await adapters.get(caller.tenant_id, adapter_id)


@router.delete("/{adapter_id}", summary="Delete an adapter", response_model=DeletedAdapter)
async def delete_adapter(adapters: Adapters, caller: OfTenant, adapter_id: AdapterId) -> Adapter:
    """Delete an adapter. All gateways apply this within a second; admitted requests continue."""
    return await adapters.delete(caller.tenant_id, adapter_id, actor=caller.actor)


@router.of_operators.get(
    "", summary="List adapters with their sources", response_model=ListBody[RegisteredAdapterBody]
)
async def list_registered(
    adapters: Adapters, caller: OfTenant, wanted: WantedPage
) -> Page[Adapter]:
    """List the adapters of a tenant, oldest first."""
    return await adapters.page(caller.tenant_id, wanted)


@router.of_operators.post("", summary="Register an adapter", response_model=RegisteredAdapterBody)
async def register_adapter(
    adapters: Adapters, caller: OfTenant, body: AdapterRegistration
) -> Adapter:
    """Register an adapter. Background jobs validate its files and copy them to the file store.

    Its `state` becomes `ready` or `failed`. Later changes of the source have no effect.
    """
    return await adapters.register(caller.tenant_id, **body.model_dump(), actor=caller.actor)
