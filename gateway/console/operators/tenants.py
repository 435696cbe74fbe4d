"""Tenants: search, and the form that creates one with its first key or owner, or changes it."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Final

from fastapi import APIRouter, Query, Request, Response

from contract.dialect import Dialect
from contract.tier import REQUEST_TIERS, ServiceTier
from gateway.accounts.keys.service import KeyService
from gateway.accounts.members import MemberService
from gateway.accounts.plans.service import PlanService
from gateway.accounts.tenants.routes import TenantCreation, Tenants
from gateway.billing.credits.service import CreditService
from gateway.console.forms import Form, checked, number
from gateway.console.limit_fields import fields_of, limit_group, read_limits
from gateway.console.lists import Newest, following
from gateway.console.rendering import form_page, page
from gateway.console.routing import FORM, AnyVisitor, OperatorRoute, SentForm, redirect, tenant_path
from gateway.console.tables import Action, Cell, Column, Field, Group, Search, Table, pairs
from gateway.http.services import AllServices, Services
from gateway.records.checks import checked_email
from gateway.records.errors import must
from gateway.records.limits import LimitScope
from gateway.records.money import read_dollars
from gateway.records.records import Billing, Tenant, TenantStatus
from gateway.records.scopes import DEFAULT_SCOPES, TENANT_SCOPES, Role

ACCESS: Final = (
    ("", "nobody yet"),
    ("owner", "an owner, invited by e-mail"),
    ("admin", "a key with all scopes of a tenant"),
    ("key", "a key for requests"),
)
KEYS: Final = {"admin": TENANT_SCOPES, "key": DEFAULT_SCOPES}
"""Scopes of the first key by the kind of access."""

router = APIRouter(prefix="/console/tenants", route_class=OperatorRoute, include_in_schema=False)


@router.get("")
async def list_tenants(
    request: Request,
    tenants: Tenants,
    wanted: Newest,
    *,
    search: Annotated[str, Query(max_length=300)] = "",
) -> Response:
    """List tenants, newest first."""
    found = await tenants.page(wanted, text=search.replace("\0", ""))
    columns = (
        Column("Name", lambda each: Cell(each.name, tenant_path(each.id)), "name"),
        Column("Id", lambda each: each.id, "mono wide"),
        Column("Status", tenant_status),
        Column("Plan", lambda each: each.plan_id, "wide"),
        Column("Payment", lambda each: each.billing, "wide"),
        Column("Tier", lambda each: each.service_tier, "wide"),
        Column("Weight", lambda each: f"{each.weight:g}", "num wide"),
        Column("Created (UTC)", lambda each: each.created_at, "time wide"),
    )
    field = Field("search", "Id or name contains", type="search")
    return page(
        request,
        "list.html",
        title="Tenants",
        action=Action("Create a tenant", "/console/tenants/new"),
        search=Search([field], {"search": search}, "Search"),
        table=Table("Tenants", columns, found.entries, "No tenant was found."),
        following=following(found, "/console/tenants", search=search),
    )


@router.api_route("/new", methods=FORM)
async def create_tenant(
    request: Request, services: AllServices, tenants: Tenants, visitor: AnyVisitor, form: SentForm
) -> Response:
    """Create a tenant with its credits and its first owner or key, which is shown once."""
    if not form.is_sent:
        return await tenant_form(request, services, form or {"weight": "1"})
    actor, access = visitor.principal.actor, form["access"]
    options = checked(TenantCreation, tenant_values(form, is_new=True)).options()
    if access not in dict(ACCESS):
        raise must("access", f"be one of {', '.join(filter(None, dict(ACCESS)))}", access)
    email = checked_email(form["email"]) if access == "owner" else ""
    micros = read_amount("credits", form["credits"]) if form["credits"] else 0
    created = await tenants.create(
        options.pop("name"), tenant_id=options.pop("id", None), actor=actor, **options
    )
    # What can be wrong with the form is checked before the tenant exists.
    if micros:
        await services.make(CreditService).grant(created.id, micros, note="", actor=actor)
    if email:
        members = services.make(MemberService)
        await members.add(created.id, email=email, role=Role.OWNER, actor=actor)
    if access not in KEYS:
        return redirect(tenant_path(created.id), done="invited" if email else "created")
    request.state.visitor = visitor = replace(visitor, tenant=created)
    key = await services.make(KeyService).create(
        created.id, name="first key", scopes=KEYS[access], **visitor.caller.key_by
    )
    return page(request, "key_secret.html", key=key.record, secret=key.key.reveal())


def tenant_status(tenant: Tenant) -> Cell:
    """Return whether a tenant is served."""
    is_active = tenant.status is TenantStatus.ACTIVE
    return Cell(tenant.status, kind="good" if is_active else "bad")


def read_amount(name: str, text: str) -> int:
    """Return an amount of a form in micro-dollars. Raises InvalidParameterError."""
    micros = read_dollars(text)
    if micros is None:
        raise must(name, "be an amount in dollars such as 12.50", text)
    return micros


async def tenant_form(
    request: Request, services: Services, form: Mapping[str, str], tenant: Tenant | None = None
) -> Response:
    """Return the page with the form of a new tenant or of a known one."""
    plans = await services.make(PlanService).list_all()
    id_hint = "1 to 63 characters from a-z, 0-9 and “-”; empty: random."
    new = [Field("id", "Id", id_hint)]
    first = [
        Field("access", "Who may use it", options=ACCESS),
        Field("email", "E-mail of the owner", type="email"),
        Field("credits", "Credits in dollars", "Only for prepaid tenants."),
    ]
    return form_page(
        request,
        title="New tenant" if tenant is None else f"Change “{tenant.name}”",
        fields=[
            Field("name", "Name", is_required=True),
            *(new if tenant is None else ()),
            Field("plan_id", "Plan", options=[("", "none"), *((p.id, p.name) for p in plans)]),
            Field("billing", "Payment", options=pairs(Billing)),
        ],
        groups=[
            *([Group("First access", first)] if tenant is None else ()),
            Group("Requests", REQUEST_FIELDS, is_folded=True),
            limit_group(LimitScope.TENANT, "Limits of its own")._replace(is_folded=True),
        ],
        form=form,
        button="Create the tenant" if tenant is None else "Save",
    )


REQUEST_FIELDS: Final = (
    Field("service_tier", "Service tier", options=pairs(REQUEST_TIERS)),
    Field("weight", "Weight", "Share of the workers relative to other waiting tenants."),
    Field("default_model", "Default model", "Of requests that name none."),
    Field("dialect", "Dialect", options=[("", "that of the model"), *pairs(Dialect)]),
    Field("cors_origins", "CORS origins", "Of web pages with its keys, by spaces; *: any."),
    Field("stripe_customer_id", "Customer in Stripe", "Such as cus_NciAYcXfLnqBoz."),
    Field("strict_parameters", "Reject parameters without effect", type="checkbox"),
    Field("shows_cost", "Responses contain their cost", type="checkbox"),
)


def tenant_values(form: Form, *, is_new: bool) -> dict[str, Any]:
    """Return the request body that a form stands for."""
    values: dict[str, Any] = {
        "name": form["name"],
        "weight": number(form["weight"] or "1"),
        "billing": form["billing"] or Billing.POSTPAID.value,
        "service_tier": form["service_tier"] or ServiceTier.DEFAULT.value,
        "cors_origins": form.words("cors_origins"),
        "limits": read_limits(form, LimitScope.TENANT, is_new=is_new),
        **{name: form[name] == "yes" for name in ("strict_parameters", "shows_cost")},
    }
    for name in ("plan_id", "default_model", "dialect", "stripe_customer_id"):
        values[name] = form[name] or None
    if is_new and form["id"]:
        values["id"] = form["id"]
    return values


def tenant_fields(tenant: Tenant) -> dict[str, str]:
    """Return the fields of the form that changes a tenant."""
    return {
        "name": tenant.name,
        "weight": f"{tenant.weight:g}",
        "plan_id": tenant.plan_id or "",
        "billing": tenant.billing.value,
        "service_tier": tenant.service_tier.value,
        "default_model": tenant.default_model or "",
        "dialect": tenant.dialect or "",
        "cors_origins": " ".join(tenant.cors_origins),
        "stripe_customer_id": tenant.stripe_customer_id or "",
        "strict_parameters": "yes" if tenant.strict_parameters else "",
        "shows_cost": "yes" if tenant.shows_cost else "",
        **fields_of(tenant.limits),
    }
