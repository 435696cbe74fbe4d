"""Adapters of a tenant: list and remove. Operators register them."""

from typing import Annotated, Final

from fastapi import APIRouter, Depends, Request, Response

from gateway.accounts.shared import AfterId
from gateway.adapters.routes import AdapterId, Adapters
from gateway.console.rendering import confirmation, page
from gateway.console.routing import FORM, SentForm, TenantRoute, Visitor, following, needs, redirect
from gateway.platform.database.paging import PageRequest
from gateway.records.scopes import Scope

ROWS: Final = 50
NOTICES: Final = {"removed": "The adapter is removed from all gateways within a second."}

router = APIRouter(route_class=TenantRoute, prefix="/adapters", include_in_schema=False)

ManagesAdapters = Annotated[Visitor, Depends(needs(Scope.KEYS, whole=True))]


@router.get("")
async def list_adapters(
    request: Request, adapters: Adapters, visitor: ManagesAdapters, after: AfterId = None
) -> Response:
    """List the tenant's adapters, newest first."""
    wanted = PageRequest(after, ROWS, is_newest_first=True)
    found = await adapters.page(visitor.tenant_id, wanted)
    return page(
        request,
        "adapters.html",
        adapters=found.entries,
        loaded=await adapters.loaded_on(found.entries),
        tenant=visitor.tenant_id,
        following=following(found, f"{visitor.home}/adapters"),
        notices=NOTICES,
    )


@router.api_route("/{adapter_id}/remove", methods=FORM)
async def remove(
    request: Request,
    adapters: Adapters,
    visitor: ManagesAdapters,
    adapter_id: AdapterId,
    form: SentForm,
) -> Response:
    """Ask for confirmation, then remove an adapter."""
    adapter, home = await adapters.get(visitor.tenant_id, adapter_id), f"{visitor.home}/adapters"
    if form.is_sent:
        await adapters.delete(visitor.tenant_id, adapter_id, actor=visitor.caller.actor)
        return redirect(home, done="removed")
    own = f" of the tenant {adapter.tenant_id}" if visitor.tenant else ""
    users = " of every tenant" if adapter.is_shared else own
    return confirmation(
        request,
        title=f"Remove the adapter “{adapter.full_name}”?",
        text=f"Requests{users} for it get 404. Those that were admitted continue.",
        button="Remove the adapter",
        back=home,
    )
