"""Tenants: search, create, change, suspend, and credits."""

from typing import Annotated, Any, Final
from urllib.parse import quote, urlencode

from fastapi import APIRouter, Query, Request, Response

from contract.tier import REQUEST_TIERS
from gateway.accounts.plans.service import PlanService
from gateway.accounts.shared import AfterId, TenantId
from gateway.accounts.tenants.routes import TenantChange, TenantCreation, Tenants
from gateway.billing.credits.service import CreditService
from gateway.billing.usage.parts import UsageFilter
from gateway.billing.usage.periods import Span
from gateway.billing.usage.service import UsageService
from gateway.console.forms import Form, checked, number
from gateway.console.limit_fields import LABELS, fields_of, read_limits
from gateway.console.rendering import confirmation, page
from gateway.console.routing import AnyVisitor, OperatorRoute, SentForm, redirect
from gateway.console.usage_query import total
from gateway.http.services import AllServices, Services
from gateway.platform.database.paging import PageRequest
from gateway.records.errors import ApiError, must
from gateway.records.limits import LimitScope
from gateway.records.money import read_dollars, show_dollars
from gateway.records.records import Billing, Tenant
from gateway.records.times import month_start, utc_now

ROWS: Final = 50
CREDITS: Final = 20
NOTICES: Final = {
    "created": "The tenant is created and active.",
    "changed": "The tenant is changed on all gateways within a second.",
    "suspended": "The tenant is suspended on all gateways within a second.",
    "activated": "The tenant is active again on all gateways within a second.",
    "credits": "The balance is changed.",
}

router = APIRouter(prefix="/console/tenants", route_class=OperatorRoute, include_in_schema=False)

Done = Annotated[str, Query(max_length=20)]


@router.get("")
async def list_tenants(
    request: Request,
    tenants: Tenants,
    *,
    search: Annotated[str, Query(max_length=300)] = "",
    after: AfterId = None,
) -> Response:
    """List tenants, newest first."""
    wanted = PageRequest(after, ROWS, is_newest_first=True)
    found = await tenants.page(wanted, text=search.replace("\0", ""))
    following = None
    if found.has_more:
        following = (
            f"/console/tenants?{urlencode({'search': search, 'after': found.entries[-1].id})}"
        )
    return page(
        request,
        "operators/tenants.html",
        tenants=found.entries,
        search=search,
        following=following,
    )


@router.get("/new")
async def show_new_tenant(request: Request, services: AllServices) -> Response:
    """Show the form of a new tenant."""
    return await _form_page(request, services, {"weight": "1"})


@router.post("/new")
async def create_tenant(
    request: Request, services: AllServices, tenants: Tenants, visitor: AnyVisitor, form: SentForm
) -> Response:
    """Create a tenant."""
    try:
        options = checked(TenantCreation, _values(form, is_new=True)).options()
        created = await tenants.create(
            options.pop("name"),
            tenant_id=options.pop("id", None),
            actor=visitor.principal.actor,
            **options,
        )
    except ApiError as error:
        return await _form_page(request, services, _shown(form), error=error)
    return redirect(_path(created.id), done="created")


@router.get("/{tenant_id}")
async def show_tenant(
    request: Request, services: AllServices, tenants: Tenants, tenant_id: TenantId, done: Done = ""
) -> Response:
    """Show a tenant with this month's usage and its balance."""
    tenant = await tenants.get(tenant_id)
    now = utc_now()
    wanted = UsageFilter(tenant_id=tenant.id)
    credit = services.make(CreditService)
    credits_page = PageRequest(None, CREDITS)
    return page(
        request,
        "operators/tenant.html",
        tenant=tenant,
        month=await total(services.make(UsageService), wanted, Span(month_start(now), now)),
        month_name=f"{now:%B %Y}",
        balance=await credit.balance(tenant.id),
        credits=(await credit.page(tenant.id, credits_page)).entries,
        home=_path(tenant.id),
        labels=LABELS,
        limits={name: value for name, value in fields_of(tenant.limits).items() if value},
        notice=NOTICES.get(done),
    )


@router.get("/{tenant_id}/edit")
async def edit_tenant(
    request: Request, services: AllServices, tenants: Tenants, tenant_id: TenantId
) -> Response:
    """Show the form that changes a tenant."""
    tenant = await tenants.get(tenant_id)
    return await _form_page(request, services, _fields(tenant), tenant=tenant)


@router.post("/{tenant_id}/edit")
async def change_tenant(
    request: Request,
    services: AllServices,
    tenants: Tenants,
    visitor: AnyVisitor,
    *,
    tenant_id: TenantId,
    form: SentForm,
) -> Response:
    """Change a tenant."""
    tenant = await tenants.get(tenant_id)
    try:
        body = checked(TenantChange, _values(form, is_new=False))
        await tenants.update(tenant.id, actor=visitor.principal.actor, **body.options())
    except ApiError as error:
        return await _form_page(request, services, _shown(form), tenant=tenant, error=error)
    return redirect(_path(tenant.id), done="changed")


@router.get("/{tenant_id}/suspend")
async def ask_to_suspend(request: Request, tenants: Tenants, tenant_id: TenantId) -> Response:
    """Ask for confirmation."""
    tenant = await tenants.get(tenant_id)
    return confirmation(
        request,
        _path(tenant.id),
        "suspend",
        title=f"Suspend the tenant “{tenant.name}”?",
        text="All gateways reject its requests within a second. Running requests continue.",
        button="Suspend the tenant",
    )


@router.post("/{tenant_id}/suspend")
async def suspend(tenants: Tenants, visitor: AnyVisitor, tenant_id: TenantId) -> Response:
    """Suspend a tenant."""
    tenant = await tenants.suspend(tenant_id, actor=visitor.principal.actor)
    return redirect(_path(tenant.id), done="suspended")


@router.post("/{tenant_id}/activate")
async def activate(tenants: Tenants, visitor: AnyVisitor, tenant_id: TenantId) -> Response:
    """Activate a suspended tenant."""
    tenant = await tenants.activate(tenant_id, actor=visitor.principal.actor)
    return redirect(_path(tenant.id), done="activated")


@router.post("/{tenant_id}/credits")
async def change_credits(
    request: Request,
    services: AllServices,
    tenants: Tenants,
    visitor: AnyVisitor,
    *,
    tenant_id: TenantId,
    form: SentForm,
) -> Response:
    """Ask for confirmation, then grant credits or adjust the balance."""
    tenant = await tenants.get(tenant_id)
    micros = _amount(form["amount"])
    is_grant = form["kind"] == "grant"
    if not form.is_confirmed:
        what = "Grant" if is_grant else "Adjust by"
        return confirmation(
            request,
            _path(tenant.id),
            "credits",
            title=f"{what} {show_dollars(micros)} to “{tenant.name}”?",
            facts={"Note": form["note"]} if form["note"] else {},
            button="Change the balance",
            fields=form.confirmed("kind", "amount", "note"),
        )
    credit, actor = services.make(CreditService), visitor.principal.actor
    if is_grant:
        await credit.grant(tenant.id, micros, note=form["note"], actor=actor)
    else:
        await credit.adjust(tenant.id, micros, note=form["note"], actor=actor)
    return redirect(_path(tenant.id), done="credits")


def _path(tenant_id: str) -> str:
    return f"/console/tenants/{quote(tenant_id, safe='')}"


def _amount(text: str) -> int:
    micros = read_dollars(text)
    if micros is None:
        raise must("amount", "be an amount in dollars such as 12.50", text)
    return micros


async def _form_page(
    request: Request,
    services: Services,
    form: dict[str, str],
    *,
    tenant: Tenant | None = None,
    error: ApiError | None = None,
) -> Response:
    plans = await services.make(PlanService).list_all()
    return page(
        request,
        "operators/tenant_form.html",
        status=200 if error is None else error.status,
        form=Form({name: [value] for name, value in form.items()}),
        tenant=tenant,
        plans=[("", "none"), *((plan.id, plan.name) for plan in plans)],
        billings=[(each.value, each.value) for each in Billing],
        tiers=[(each.value, each.value) for each in REQUEST_TIERS],
        limits=LABELS,
        action="/console/tenants/new" if tenant is None else f"{_path(tenant.id)}/edit",
        error=error,
    )


def _values(form: Form, *, is_new: bool) -> dict[str, Any]:
    """Return the request body that a form stands for."""
    values: dict[str, Any] = {
        "name": form["name"],
        "weight": number(form["weight"] or "1"),
        "plan_id": form["plan_id"] or None,
        "billing": form["billing"] or Billing.POSTPAID.value,
        "service_tier": form["service_tier"] or "default",
        "default_model": form["default_model"] or None,
        "stripe_customer_id": form["stripe_customer_id"] or None,
        "limits": read_limits(form, LimitScope.TENANT, is_new=is_new),
    }
    if is_new and form["id"]:
        values["id"] = form["id"]
    return values


def _fields(tenant: Tenant) -> dict[str, str]:
    return {
        "name": tenant.name,
        "weight": f"{tenant.weight:g}",
        "plan_id": tenant.plan_id or "",
        "billing": tenant.billing.value,
        "service_tier": tenant.service_tier.value,
        "default_model": tenant.default_model or "",
        "stripe_customer_id": tenant.stripe_customer_id or "",
        **fields_of(tenant.limits),
    }


def _shown(form: Form) -> dict[str, str]:
    return {name: form[name] for name in form}
