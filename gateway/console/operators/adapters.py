"""Adapters of all tenants: list, register and remove."""

from typing import Annotated, Any, Final
from urllib.parse import quote

from fastapi import APIRouter, Query, Request, Response

from gateway.accounts.shared import AfterId, TenantId
from gateway.adapters.routes import AdapterId, AdapterRegistration, Adapters
from gateway.console.forms import Form, checked
from gateway.console.rendering import confirmation, page
from gateway.console.routing import AnyVisitor, OperatorRoute, SentForm, redirect
from gateway.http.services import AllServices, Services
from gateway.models.catalogue import Catalogue
from gateway.platform.database.paging import PageRequest
from gateway.records.errors import ApiError

ROWS: Final = 50
HOME: Final = "/console/adapters"
FIELDS: Final = ("tenant", "name", "base_model", "source", "is_shared")
NOTICES: Final = {
    "registered": "The adapter is registered. Its files are being checked.",
    "removed": "The adapter is removed from all gateways within a second.",
}

router = APIRouter(route_class=OperatorRoute, include_in_schema=False)


@router.get(HOME)
async def list_adapters(
    request: Request,
    adapters: Adapters,
    *,
    tenant: Annotated[str, Query(max_length=100)] = "",
    after: AfterId = None,
    done: Annotated[str, Query(max_length=20)] = "",
) -> Response:
    """List the adapters of all tenants or of one, newest first."""
    wanted = PageRequest(after, ROWS, is_newest_first=True)
    found = await (adapters.page(tenant, wanted) if tenant else adapters.page_of_all(wanted))
    following = None
    if found.has_more:
        query = f"tenant={quote(tenant, safe='')}&" if tenant else ""
        following = f"{HOME}?{query}after={found.entries[-1].id}"
    return page(
        request,
        "adapters.html",
        adapters=found.entries,
        loaded=await adapters.loaded_on(found.entries),
        tenant=tenant,
        following=following,
        notice=NOTICES.get(done),
    )


@router.get(f"{HOME}/new")
async def show_new_adapter(
    request: Request, services: AllServices, tenant: Annotated[str, Query(max_length=100)] = ""
) -> Response:
    """Show the form of a new adapter."""
    return _form_page(request, services, Form({"tenant": [tenant]}))


@router.post(f"{HOME}/new")
async def register(
    request: Request, services: AllServices, adapters: Adapters, visitor: AnyVisitor, form: SentForm
) -> Response:
    """Ask for confirmation, then register an adapter."""
    try:
        values: dict[str, Any] = {name: form[name] for name in ("name", "base_model", "source")}
        body = checked(AdapterRegistration, values | {"is_shared": form["is_shared"] == "yes"})
        if not form.is_confirmed:
            return confirmation(
                request,
                HOME,
                "new",
                title="Register this adapter?",
                facts={
                    "Tenant": form["tenant"],
                    "Name": body.name,
                    "Base model": body.base_model,
                    "Source": body.source,
                    "Used by": "every tenant" if body.is_shared else "its tenant",
                },
                button="Register the adapter",
                fields=form.confirmed(*FIELDS),
            )
        actor = visitor.principal.actor
        await adapters.register(form["tenant"], **body.model_dump(), actor=actor)
    except ApiError as error:
        return _form_page(request, services, form, error)
    return redirect(HOME, done="registered")


@router.get("/console/tenants/{tenant_id}/adapters/{adapter_id}/remove")
async def ask_to_remove(
    request: Request, adapters: Adapters, tenant_id: TenantId, adapter_id: AdapterId
) -> Response:
    """Ask for confirmation."""
    adapter = await adapters.get(tenant_id, adapter_id)
    users = "every tenant" if adapter.is_shared else f"the tenant {adapter.tenant_id}"
    return confirmation(
        request,
        f"/console/tenants/{quote(adapter.tenant_id, safe='')}/adapters/{adapter.id}",
        "remove",
        title=f"Remove the adapter “{adapter.full_name}”?",
        text=f"Requests of {users} for it get 404. Those that were admitted continue.",
        button="Remove the adapter",
        back=HOME,
    )


@router.post("/console/tenants/{tenant_id}/adapters/{adapter_id}/remove")
async def remove(
    adapters: Adapters, visitor: AnyVisitor, tenant_id: TenantId, adapter_id: AdapterId
) -> Response:
    """Remove an adapter."""
    await adapters.delete(tenant_id, adapter_id, actor=visitor.principal.actor)
    return redirect(HOME, done="removed")


def _form_page(
    request: Request, services: Services, form: Form, error: ApiError | None = None
) -> Response:
    models = [each.card.model for each in services[Catalogue].models if each.card.adapters]
    return page(
        request,
        "operators/adapter_form.html",
        status=200 if error is None else error.status,
        form=form,
        models=models,
        error=error,
    )
