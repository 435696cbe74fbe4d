"""Adapters of all tenants: list and register."""

from typing import Annotated, Any, Final
from urllib.parse import urlencode

from fastapi import APIRouter, Query, Request, Response

from gateway.adapters.routes import AdapterRegistration, Adapters
from gateway.console.customers.adapters import adapters_table
from gateway.console.forms import checked
from gateway.console.lists import Newest, following
from gateway.console.rendering import confirmation, form_page, page
from gateway.console.routing import FORM, AnyVisitor, OperatorRoute, SentForm, redirect
from gateway.console.tables import Action, Field, Search, pairs
from gateway.http.services import AllServices
from gateway.models.catalogue import Catalogue

HOME: Final = "/console/adapters"
NOTICES: Final = {"registered": "The adapter is registered. Its files are being checked."}

router = APIRouter(route_class=OperatorRoute, include_in_schema=False)


@router.get(HOME)
async def list_adapters(
    request: Request,
    adapters: Adapters,
    visitor: AnyVisitor,
    wanted: Newest,
    *,
    tenant: Annotated[str, Query(max_length=100)] = "",
) -> Response:
    """List the adapters of all tenants or of one, newest first."""
    found = await (adapters.page(tenant, wanted) if tenant else adapters.page_of_all(wanted))
    query = f"?{urlencode({'tenant': tenant})}" if tenant else ""
    return page(
        request,
        "list.html",
        title="Adapters",
        action=Action("Register an adapter", f"{HOME}/new{query}"),
        search=Search([Field("tenant", "Tenant")], {"tenant": tenant}),
        table=await adapters_table(visitor, adapters, found.entries),
        following=following(found, HOME, **({"tenant": tenant} if tenant else {})),
        notices=NOTICES,
    )


@router.api_route(f"{HOME}/new", methods=FORM)
async def register(
    request: Request,
    services: AllServices,
    adapters: Adapters,
    visitor: AnyVisitor,
    *,
    form: SentForm,
    tenant: Annotated[str, Query(max_length=100)] = "",
) -> Response:
    """Ask for confirmation, then register an adapter."""
    if not form.is_sent:
        return form_page(
            request,
            title="New adapter",
            text="Background jobs check the files and copy them to the file store.",
            fields=_fields(services[Catalogue]),
            form=form or {"tenant": tenant},
            button="Continue",
        )
    values: dict[str, Any] = {name: form[name] for name in ("name", "base_model", "source")}
    body = checked(AdapterRegistration, values | {"is_shared": form["is_shared"] == "yes"})
    if not form.is_confirmed:
        return confirmation(
            request,
            title="Register this adapter?",
            facts={
                "Tenant": form["tenant"],
                "Name": body.name,
                "Base model": body.base_model,
                "Source": body.source,
                "Used by": "every tenant" if body.is_shared else "its tenant",
            },
            button="Register the adapter",
            fields=form.confirmed("tenant", *values, "is_shared"),
        )
    actor = visitor.principal.actor
    await adapters.register(form["tenant"], **body.model_dump(), actor=actor)
    return redirect(HOME, done="registered")


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
