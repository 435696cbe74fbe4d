"""Tenants: search, create one with its first key or owner, change its state and credits."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Final

from fastapi import APIRouter, Query, Response

from contract.dialect import Dialect
from contract.tier import REQUEST_TIERS
from gateway.accounts.keys.service import KeyService
from gateway.accounts.members import MemberService
from gateway.accounts.plans.service import PlanService
from gateway.accounts.tenants.routes import TenantChange, TenantCreation, Tenants
from gateway.billing.credits.service import CreditService
from gateway.console.customers.keys import secret_page
from gateway.console.forms import Form, checked, texts_of, values_of
from gateway.console.limit_fields import fields_of, limit_group, read_limits
from gateway.console.lists import Newest
from gateway.console.routing import FORM, AnyVisitor, OperatorRoute, SeenTenant, redirect
from gateway.console.tables import Action, Cell, Column, Field, Group, Search, pairs
from gateway.console.visitor import TENANT_PAGES, Visitor, tenant_path
from gateway.http.services import services_of
from gateway.records.checks import checked_email
from gateway.records.errors import must
from gateway.records.limits import LimitScope
from gateway.records.money import read_dollars, show_dollars
from gateway.records.records import AnomalyAction, Billing, Tenant, TenantStatus
from gateway.records.scopes import DEFAULT_SCOPES, TENANT_SCOPES, Role

HOME: Final = "/console/tenants"
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
    Field("credits", "Credits in dollars", "Only for prepaid tenants.", "dollars"),
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
    Field("time_zone", "Time zone", "Of spend limits, such as Europe/Paris.", default="UTC"),
    Field(
        "anomaly_factor",
        "Anomaly of a key",
        "So many times of what it usually spends in an hour. Empty: none.",
        "number",
    ),
    Field(
        "anomaly_repeats",
        "Repetition by a key",
        "So many equal requests in an hour. Empty: any number.",
        "number",
    ),
    Field("anomaly_action", "After an anomaly", options=pairs(AnomalyAction), default="stop"),
    Field("strict_parameters", "Reject parameters without effect", type="checkbox"),
    Field("shows_cost", "Responses contain their cost", type="checkbox"),
    Field("zero_retention", "Zero retention of requests", type="checkbox"),
)
LIMITS: Final = limit_group(LimitScope.TENANT, "Limits of its own")._replace(is_folded=True)

router = APIRouter(route_class=OperatorRoute, include_in_schema=False)


@router.get(HOME)
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
            Column("Status", _status),
            Column("Plan", lambda each: each.plan_id, "wide"),
            Column("Payment", lambda each: each.billing, "wide"),
            Column("Tier", lambda each: each.service_tier, "wide"),
            Column("Weight", lambda each: f"{each.weight:g}", "num wide", lambda each: each.weight),
            Column("Created (UTC)", lambda each: each.created_at, "time wide"),
        ),
        await tenants.page(wanted, text=search.replace("\0", "")),
        "No tenant was found.",
        action=Action("Create a tenant", f"{HOME}/new"),
        search=Search([field], {"search": search}, "Search"),
    )


@router.api_route(f"{HOME}/new", methods=FORM)
async def create(visitor: AnyVisitor, tenants: Tenants) -> Response:
    """Create a tenant with its credits and its first owner or key, which is shown once."""
    form = visitor.form
    if not form.is_sent:
        return await _form(visitor, {})
    actor, access = visitor.caller.actor, form["access"]
    options = checked(TenantCreation, _values(form, is_new=True)).options()
    if access not in dict(ACCESS):
        raise must("access", f"be one of {', '.join(filter(None, dict(ACCESS)))}", access)
    email = checked_email(form["email"]) if access == "owner" else ""
    micros = values_of(FIRST, form).get("credits")
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
    created_key = await visitor.make(KeyService).create(
        created.id, name="first key", scopes=KEYS[access], **visitor.caller.key_by
    )
    return secret_page(visitor, services_of(visitor.request), created_key)


@router.api_route(f"{TENANT_PAGES}/edit", methods=FORM)
async def change(visitor: AnyVisitor, tenants: Tenants, tenant: SeenTenant) -> Response:
    """Change a tenant."""
    if not visitor.form.is_sent:
        return await _form(visitor, _texts(tenant), tenant)
    body = checked(TenantChange, _values(visitor.form, is_new=False))
    await tenants.update(tenant.id, actor=visitor.caller.actor, **body.options())
    return redirect(visitor.home, done="changed")


@router.api_route(f"{TENANT_PAGES}/suspend", methods=FORM)
async def suspend(visitor: AnyVisitor, tenants: Tenants, tenant: SeenTenant) -> Response:
    """Ask for confirmation, then suspend a tenant."""
    if visitor.form.is_sent:
        await tenants.suspend(tenant.id, actor=visitor.caller.actor)
        return redirect(visitor.home, done="suspended")
    return visitor.confirmation(
        "Suspend the tenant",
        of=tenant.name,
        text="All gateways reject its requests within a second. Running requests continue.",
    )


@router.post(f"{TENANT_PAGES}/activate")
async def activate(visitor: AnyVisitor, tenants: Tenants, tenant: SeenTenant) -> Response:
    """Activate a suspended tenant."""
    await tenants.activate(tenant.id, actor=visitor.caller.actor)
    return redirect(visitor.home, done="activated")


@router.post(f"{TENANT_PAGES}/credits")
async def change_credits(visitor: AnyVisitor, tenant: SeenTenant) -> Response:
    """Ask for confirmation, then grant credits or adjust the balance."""
    form = visitor.form
    micros, note = read_dollars(form["amount"]), form["note"]
    if micros is None:
        raise must("amount", "be an amount in dollars such as 12.50", form["amount"])
    is_grant = form["kind"] == "grant"
    if not form.is_confirmed:
        what = "Grant" if is_grant else "Adjust by"
        return visitor.confirmation(
            "Change the balance",
            title=f"{what} {show_dollars(micros)} to “{tenant.name}”?",
            facts={"Note": note} if note else {},
        )
    credit = visitor.make(CreditService)
    change = credit.grant if is_grant else credit.adjust
    await change(tenant.id, micros, note=note, actor=visitor.caller.actor)
    return redirect(visitor.home, done="credits")


def _status(tenant: Tenant) -> Cell:
    is_active = tenant.status is TenantStatus.ACTIVE
    return Cell(tenant.status, kind="good" if is_active else "bad")


async def _form(
    visitor: Visitor, values: Mapping[str, str], tenant: Tenant | None = None
) -> Response:
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


def _values(form: Form, *, is_new: bool) -> dict[str, Any]:
    fields = [NAME, PLAN, BILLING, *REQUEST_FIELDS, *([ID] if is_new else [])]
    limits = read_limits(form, LimitScope.TENANT, is_new=is_new)
    return {**values_of(fields, form, is_new=is_new), "limits": limits}


def _texts(tenant: Tenant) -> dict[str, str]:
    fields = [NAME, PLAN, BILLING, *REQUEST_FIELDS]
    return texts_of(fields, tenant, **fields_of(tenant.limits))
