"""Adapters: of a tenant, whose customers may remove them, and of all; operators register them."""

from typing import Annotated, Any, Final
from urllib.parse import urlencode

from fastapi import APIRouter, Depends, Query, Response

from gateway.adapters.routes import AdapterId, AdapterRegistration, Adapters
from gateway.adapters.service import AdapterService
from gateway.console.formats import size
from gateway.console.forms import checked, values_of
from gateway.console.lists import Newest
from gateway.console.routing import FORM, AnyVisitor, OperatorRoute, TenantRoute, needs, redirect
from gateway.console.tables import Action, Cell, Column, Field, Search, pairs
from gateway.console.visitor import Visitor, tenant_path
from gateway.http.services import AllServices
from gateway.models.catalogue import Catalogue
from gateway.platform.database.paging import Page
from gateway.records.adapters import Adapter, AdapterState
from gateway.records.scopes import Scope

HOME: Final = "/console/adapters"
TEXT: Final = (
    "A request uses an adapter by its name as the model, or by the base model, a colon and the "
    "name. Operators register adapters."
)
_CLASSES: Final = {AdapterState.READY: "good", AdapterState.FAILED: "bad"}
NOTICES: Final = {
    "registered": "The adapter is registered. Its files are being checked.",
    "removed": "The adapter is removed from all gateways within a second.",
}

of_tenant = APIRouter(route_class=TenantRoute, prefix="/adapters", include_in_schema=False)
operators = APIRouter(route_class=OperatorRoute, include_in_schema=False)

Manager = Annotated[Visitor, Depends(needs(Scope.KEYS, whole=True))]
Tenant = Annotated[str, Query(max_length=100)]


@of_tenant.get("")
async def list_own(visitor: Manager, adapters: Adapters, wanted: Newest) -> Response:
    """List the tenant's adapters, newest first."""
    found = await adapters.page(visitor.tenant_id, wanted)
    text = "" if visitor.is_operator else TEXT
    return await _page(visitor, adapters, found, text=text, notices=NOTICES)


@of_tenant.api_route("/{adapter_id}/remove", methods=FORM)
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


@operators.get(HOME)
async def list_all(
    visitor: AnyVisitor, adapters: Adapters, wanted: Newest, tenant: Tenant = ""
) -> Response:
    """List the adapters of all tenants or of one, newest first."""
    query = f"?{urlencode({'tenant': tenant})}" if tenant else ""
    return await _page(
        visitor,
        adapters,
        await (adapters.page(tenant, wanted) if tenant else adapters.page_of_all(wanted)),
        action=Action("Register an adapter", f"{HOME}/new{query}"),
        search=Search([Field("tenant", "Tenant")], {"tenant": tenant}),
        notices=NOTICES,
    )


@operators.api_route(f"{HOME}/new", methods=FORM)
async def register(
    visitor: AnyVisitor, services: AllServices, adapters: Adapters, tenant: Tenant = ""
) -> Response:
    """Ask for confirmation, then register an adapter."""
    form, fields = visitor.form, _fields(services[Catalogue])
    if not form.is_sent:
        return visitor.form_page(
            "New adapter",
            fields,
            "Continue",
            values={"tenant": tenant},
            text="Background jobs check the files and copy them to the file store.",
        )
    body = checked(AdapterRegistration, values_of(fields[1:], form))
    if not form.is_confirmed:
        return visitor.confirmation(
            "Register the adapter",
            title="Register this adapter?",
            facts={
                "Tenant": form["tenant"],
                "Name": body.name,
                "Base model": body.base_model,
                "Source": body.source,
                "Used by": "every tenant" if body.is_shared else "its tenant",
            },
        )
    actor = visitor.caller.actor
    await adapters.register(form["tenant"], **body.model_dump(), actor=actor)
    return redirect(HOME, done="registered")


async def _page(
    visitor: Visitor, adapters: AdapterService, found: Page[Adapter], **options: Any
) -> Response:
    """Return a page of adapters; operators see which tenants and workers have them."""
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
        Column(
            "Size",
            lambda each: size(each.size) if each.size else None,
            "num wide",
            order=lambda each: each.size,
        ),
        Column("Used by", lambda each: "every tenant" if each.is_shared else "its tenant", "wide"),
        Column("Loaded on", workers, "wide mono" if visitor.is_operator else "wide"),
        Column("Registered (UTC)", lambda each: each.created_at, "time wide"),
        *([Column("", removal, "actions")] if visitor.may_change else []),
        Column("Id", lambda each: each.id, "below"),
        Column("Why it failed", lambda each: each.reason, "below"),
    )
    return visitor.list_page("Adapters", columns, found, "There is no adapter.", **options)


def _fields(catalogue: Catalogue) -> list[Field]:
    models = [each.card.model for each in catalogue.models if each.card.adapters]
    none = "" if models else "No worker serves adapters at the moment."
    source = "A folder of the machines that run background jobs, or s3://BUCKET/PREFIX."
    return [
        Field("tenant", "Tenant", "Id of the tenant that owns it.", is_required=True),
        Field("name", "Name", "Selects the adapter in requests.", is_required=True),
        Field("base_model", "Base model", none, "name", pairs(models), is_required=True),
        Field("source", "Source", source, is_required=True),
        Field("is_shared", "Every tenant may use it", type="checkbox"),
    ]
