"""Adapters of all tenants: list and register."""

from typing import Annotated, Final
from urllib.parse import urlencode

from fastapi import APIRouter, Query, Response

from gateway.adapters.routes import AdapterRegistration, Adapters
from gateway.console.customers.adapters import adapters_page
from gateway.console.forms import checked, values_of
from gateway.console.lists import Newest
from gateway.console.routing import FORM, AnyVisitor, OperatorRoute, redirect
from gateway.console.tables import Action, Field, Search, pairs
from gateway.http.services import AllServices
from gateway.models.catalogue import Catalogue

HOME: Final = "/console/adapters"
NOTICES: Final = {"registered": "The adapter is registered. Its files are being checked."}

router = APIRouter(route_class=OperatorRoute, include_in_schema=False)

Tenant = Annotated[str, Query(max_length=100)]


@router.get(HOME)
async def list_adapters(
    visitor: AnyVisitor, adapters: Adapters, wanted: Newest, tenant: Tenant = ""
) -> Response:
    """List the adapters of all tenants or of one, newest first."""
    query = f"?{urlencode({'tenant': tenant})}" if tenant else ""
    return await adapters_page(
        visitor,
        adapters,
        await (adapters.page(tenant, wanted) if tenant else adapters.page_of_all(wanted)),
        action=Action("Register an adapter", f"{HOME}/new{query}"),
        search=Search([Field("tenant", "Tenant")], {"tenant": tenant}),
        notices=NOTICES,
    )


@router.api_route(f"{HOME}/new", methods=FORM)
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
