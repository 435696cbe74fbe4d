"""Tenants: search, and the form that creates one with its first key or owner, or changes it."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Final

from fastapi import APIRouter, Query, Response

from contract.dialect import Dialect
from contract.tier import REQUEST_TIERS
from gateway.accounts.keys.service import KeyService
from gateway.accounts.members import MemberService
from gateway.accounts.plans.service import PlanService
from gateway.accounts.tenants.routes import TenantCreation, Tenants
from gateway.billing.credits.service import CreditService
from gateway.console.forms import Form, checked, texts_of, values_of
from gateway.console.limit_fields import fields_of, limit_group, read_limits
from gateway.console.lists import Newest
from gateway.console.routing import FORM, AnyVisitor, OperatorRoute, redirect
from gateway.console.tables import Action, Cell, Column, Field, Group, Search, pairs
from gateway.console.visitor import Visitor, tenant_path
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
NAME: Final = Field("name", "Name", is_required=True)
ID: Final = Field("id", "Id", "1 to 63 characters from a-z, 0-9 and “-”; empty: random.")
PLAN: Final = Field("plan_id", "Plan")
BILLING: Final = Field("billing", "Payment", options=pairs(Billing), default=Billing.POSTPAID.value)
FIRST: Final = (
    Field("access", "Who may use it", options=ACCESS),
    Field("email", "E-mail of the owner", type="email"),
    Field("credits", "Credits in dollars", "Only for prepaid tenants."),
)
REQUEST_FIELDS: Final = (
    Field("service_tier", "Service tier", options=pairs(REQUEST_TIERS), default="default"),
    Field(
        "weight",
        "Weight",
        "Share of the workers relative to other waiting tenants.",
        "number",
        default="1",
    ),
    Field("default_model", "Default model", "Of requests that name none."),
    Field("dialect", "Dialect", options=[("", "that of the model"), *pairs(Dialect)]),
    Field(
        "cors_origins", "CORS origins", "Of web pages with its keys, by spaces; *: any.", "words"
    ),
    Field("stripe_customer_id", "Customer in Stripe", "Such as cus_NciAYcXfLnqBoz."),
    Field("strict_parameters", "Reject parameters without effect", type="checkbox"),
    Field("shows_cost", "Responses contain their cost", type="checkbox"),
)
LIMITS: Final = limit_group(LimitScope.TENANT, "Limits of its own")._replace(is_folded=True)

router = APIRouter(prefix="/console/tenants", route_class=OperatorRoute, include_in_schema=False)


@router.get("")
async def list_tenants(
    visitor: AnyVisitor,
    tenants: Tenants,
    wanted: Newest,
    search: Annotated[str, Query(max_length=300)] = "",
) -> Response:
    """List tenants, newest first."""
    field = Field("search", "Id or name contains", type="search")
    return visitor.list_page(
        "Tenants",
        (
            Column("Name", lambda each: Cell(each.name, tenant_path(each.id)), "name"),
            Column("Id", lambda each: each.id, "mono wide"),
            Column("Status", tenant_status),
            Column("Plan", lambda each: each.plan_id, "wide"),
            Column("Payment", lambda each: each.billing, "wide"),
            Column("Tier", lambda each: each.service_tier, "wide"),
            Column("Weight", lambda each: f"{each.weight:g}", "num wide"),
            Column("Created (UTC)", lambda each: each.created_at, "time wide"),
        ),
        await tenants.page(wanted, text=search.replace("\0", "")),
        "No tenant was found.",
        action=Action("Create a tenant", "/console/tenants/new"),
        search=Search([field], {"search": search}, "Search"),
    )


@router.api_route("/new", methods=FORM)
async def create(visitor: AnyVisitor, tenants: Tenants) -> Response:
    """Create a tenant with its credits and its first owner or key, which is shown once."""
    form = visitor.form
    if not form.is_sent:
        return await tenant_form(visitor, {"weight": "1"})
    actor, access = visitor.caller.actor, form["access"]
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
        await visitor.make(CreditService).grant(created.id, micros, note="", actor=actor)
    if email:
        members = visitor.make(MemberService)
        await members.add(created.id, email=email, role=Role.OWNER, actor=actor)
    if access not in KEYS:
        return redirect(tenant_path(created.id), done="invited" if email else "created")
    visitor.request.state.visitor = visitor = replace(visitor, tenant=created)
    key = await visitor.make(KeyService).create(
        created.id, name="first key", scopes=KEYS[access], **visitor.caller.key_by
    )
    return visitor.page("key_secret.html", key=key.record, secret=key.key.reveal())


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
    visitor: Visitor, values: Mapping[str, str], tenant: Tenant | None = None
) -> Response:
    """Return the page with the form of a new tenant or of a known one."""
    plans = await visitor.make(PlanService).list_all()
    plan = PLAN._replace(options=[("", "none"), *((each.id, each.name) for each in plans)])
    more = [Group("Requests", REQUEST_FIELDS, is_folded=True), LIMITS]
    if tenant is not None:
        fields, title = [NAME, plan, BILLING], f"Change “{tenant.name}”"
        return visitor.form_page(title, fields, "Save", values=values, groups=more)
    fields, groups = [NAME, ID, plan, BILLING], [Group("First access", FIRST), *more]
    return visitor.form_page(
        "New tenant", fields, "Create the tenant", values=values, groups=groups
    )


def tenant_values(form: Form, *, is_new: bool) -> dict[str, Any]:
    """Return the request body that a form stands for."""
    fields = [NAME, PLAN, BILLING, *REQUEST_FIELDS, *([ID] if is_new else [])]
    limits = read_limits(form, LimitScope.TENANT, is_new=is_new)
    return {**values_of(fields, form, is_new=is_new), "limits": limits}


def tenant_texts(tenant: Tenant) -> dict[str, str]:
    """Return the texts of the form that changes a tenant."""
    fields = [NAME, PLAN, BILLING, *REQUEST_FIELDS]
    return texts_of(fields, tenant, **fields_of(tenant.limits))
