"""Adapters of a tenant: list and remove. Operators register them."""

from collections.abc import Sequence
from typing import Annotated, Final

from fastapi import APIRouter, Depends, Request, Response

from gateway.adapters.routes import AdapterId, Adapters
from gateway.adapters.service import AdapterService
from gateway.console.formats import size
from gateway.console.lists import Newest, following
from gateway.console.rendering import confirmation, page
from gateway.console.routing import (
    FORM,
    SentForm,
    TenantRoute,
    Visitor,
    needs,
    redirect,
    tenant_path,
)
from gateway.console.tables import Cell, Column, Table
from gateway.records.adapters import Adapter, AdapterState
from gateway.records.scopes import Scope

TEXT: Final = (
    "A request uses an adapter by its name as the model, or by the base model, a colon and the "
    "name. Operators register adapters."
)
_CLASSES: Final = {AdapterState.READY: "good", AdapterState.FAILED: "bad"}
NOTICES: Final = {"removed": "The adapter is removed from all gateways within a second."}

router = APIRouter(route_class=TenantRoute, prefix="/adapters", include_in_schema=False)

ManagesAdapters = Annotated[Visitor, Depends(needs(Scope.KEYS, whole=True))]


@router.get("")
async def list_adapters(
    request: Request, adapters: Adapters, visitor: ManagesAdapters, wanted: Newest
) -> Response:
    """List the tenant's adapters, newest first."""
    found = await adapters.page(visitor.tenant_id, wanted)
    return page(
        request,
        "list.html",
        title="Adapters",
        text="" if visitor.is_operator else TEXT,
        table=await adapters_table(visitor, adapters, found.entries),
        following=following(found, f"{visitor.home}/adapters"),
        notices=NOTICES,
    )


async def adapters_table(
    visitor: Visitor, adapters: AdapterService, found: Sequence[Adapter]
) -> Table:
    """Return adapters with their states; operators see which tenants and workers have them."""
    loaded = await adapters.loaded_on(found)

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
    return Table("Adapters", columns, found, "There is no adapter.")


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
