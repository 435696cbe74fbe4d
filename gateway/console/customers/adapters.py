"""Adapters of a tenant: list and remove. Operators register them."""

from typing import Annotated, Any, Final

from fastapi import APIRouter, Depends, Response

from gateway.adapters.routes import AdapterId, Adapters
from gateway.adapters.service import AdapterService
from gateway.console.formats import size
from gateway.console.lists import Newest
from gateway.console.routing import FORM, TenantRoute, needs, redirect
from gateway.console.tables import Cell, Column
from gateway.console.visitor import Visitor, tenant_path
from gateway.platform.database.paging import Page
from gateway.records.adapters import Adapter, AdapterState
from gateway.records.scopes import Scope

TEXT: Final = (
    "A request uses an adapter by its name as the model, or by the base model, a colon and the "
    "name. Operators register adapters."
)
_CLASSES: Final = {AdapterState.READY: "good", AdapterState.FAILED: "bad"}
NOTICES: Final = {"removed": "The adapter is removed from all gateways within a second."}

router = APIRouter(route_class=TenantRoute, prefix="/adapters", include_in_schema=False)

Manager = Annotated[Visitor, Depends(needs(Scope.KEYS, whole=True))]


@router.get("")
async def list_adapters(visitor: Manager, adapters: Adapters, wanted: Newest) -> Response:
    """List the tenant's adapters, newest first."""
    found = await adapters.page(visitor.tenant_id, wanted)
    text = "" if visitor.is_operator else TEXT
    return await adapters_page(visitor, adapters, found, text=text, notices=NOTICES)


async def adapters_page(
    visitor: Visitor, adapters: AdapterService, found: Page[Adapter], **options: Any
) -> Response:
    """Return a page of adapters; operators see which tenants and workers have them.

    The options are those of a page with a list.
    """
    loaded = await adapters.loaded_on(found.entries)

    def workers(each: Adapter) -> str:
        names = loaded[each.id]
        if visitor.is_operator or not names:
            return ", ".join(names)
        return f"{len(names)} {'worker' if len(names) == 1 else 'workers'}"

    def removal(each: Adapter) -> Cell:
        home = tenant_path(each.tenant_id) if visitor.is_operator else visitor.home
        href = f"{home}/adapters/{each.id}/remove"
        return Cell("Remove", href, label=f"Remove {each.full_name}")

    tenant = Column("Tenant", lambda each: Cell(each.tenant_id, tenant_path(each.tenant_id)))
    columns = (
        Column("Model", lambda each: each.full_name, "name"),
        *([tenant] if visitor.is_operator else []),
        Column("State", lambda each: Cell(each.state, kind=_CLASSES.get(each.state, "warn"))),
        Column("Rank", lambda each: each.rank or None, "num wide"),
        Column("Size", lambda each: size(each.size) if each.size else None, "num wide"),
        Column("Used by", lambda each: "every tenant" if each.is_shared else "its tenant", "wide"),
        Column("Loaded on", workers, "wide mono" if visitor.is_operator else "wide"),
        Column("Registered (UTC)", lambda each: each.created_at, "time wide"),
        *([Column("", removal, "actions")] if visitor.may_change else []),
        Column("Id", lambda each: each.id, "below"),
        Column("Why it failed", lambda each: each.reason, "below"),
    )
    return visitor.list_page("Adapters", columns, found, "There is no adapter.", **options)


@router.api_route("/{adapter_id}/remove", methods=FORM)
async def remove(visitor: Manager, adapters: Adapters, adapter_id: AdapterId) -> Response:
    """Ask for confirmation, then remove an adapter."""
    adapter, home = await adapters.get(visitor.tenant_id, adapter_id), f"{visitor.home}/adapters"
    if visitor.form.is_sent:
        await adapters.delete(visitor.tenant_id, adapter_id, actor=visitor.caller.actor)
        return redirect(home, done="removed")
    own = f" of the tenant {adapter.tenant_id}" if visitor.tenant else ""
    users = " of every tenant" if adapter.is_shared else own
    return visitor.confirmation(
        "Remove the adapter",
        of=adapter.full_name,
        text=f"Requests{users} for it get 404. Those that were admitted continue.",
        back=home,
    )
