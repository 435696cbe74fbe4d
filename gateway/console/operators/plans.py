"""Plans: list, create and change."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, Final

from fastapi import APIRouter, Response

from gateway.accounts.plans.routes import PlanChange, PlanCreation, PlanId, Plans
from gateway.accounts.plans.spending import read_spend_limits
from gateway.console.forms import Form, checked
from gateway.console.limit_fields import LABELS, fields_of, limit_group, read_limits, shown_limit
from gateway.console.routing import FORM, AnyVisitor, OperatorRoute, redirect
from gateway.console.tables import Action, Cell, Column, Field, Group
from gateway.records.errors import must
from gateway.records.limits import LimitScope, names_of
from gateway.records.money import plain_dollars, read_dollars, show_dollars
from gateway.records.records import Plan

HOME: Final = "/console/plans"
HINT: Final = "A number, or empty for no limit."
ID: Final = Field("id", "Id", "1 to 63 characters from a-z, 0-9 and “-”.", is_required=True)
NAME: Final = Field("name", "Name", "Empty: the id.")
SPENDING: Final = Field(
    "spend_limits",
    "Spend limits of each tenant",
    "In dollars, such as tenant/month=2000 user/day=0.50. A name may end with /MODEL.",
    "words",
)
_HOLDERS: Final = {
    LimitScope.TENANT: "Limits of each tenant",
    LimitScope.PROJECT: "Limits of each project without its own",
    LimitScope.KEY: "Limits of each key without its own",
}
NOTICES: Final = {
    "created": "The plan is created. Choose it on the page of a tenant.",
    "changed": "The plan is changed on all gateways within a second.",
}

router = APIRouter(route_class=OperatorRoute, prefix=HOME, include_in_schema=False)


@router.get("")
async def list_plans(visitor: AnyVisitor, plans: Plans) -> Response:
    """List plans with the numbers of their tenants."""
    tenants = await plans.tenants()
    return visitor.list_page(
        "Plans",
        (
            Column("Plan", lambda plan: Cell(plan.name, f"{HOME}/{plan.id}")),
            Column("Id", lambda plan: plan.id, "mono"),
            Column("Tenants", lambda plan: tenants.get(plan.id, 0), "num"),
            *(Column(text, partial(_summary, scope), "below") for scope, text in _HOLDERS.items()),
            Column("Spend limits of each tenant", _spending, "below"),
        ),
        await plans.list_all(),
        "There is no plan.",
        action=Action("Create a plan", f"{HOME}/new"),
        text="Limits of every tenant that has the plan, unless the tenant has its own.",
        notices=NOTICES,
    )


@router.api_route("/new", methods=FORM)
async def create(visitor: AnyVisitor, plans: Plans) -> Response:
    """Create a plan."""
    form = visitor.form
    if not form.is_sent:
        return visitor.form_page(
            "New plan", [ID, NAME, SPENDING], "Create the plan", groups=_groups()
        )
    body = checked(PlanCreation, {"id": form["id"], **_values(form)})
    actor = visitor.caller.actor
    await plans.create(
        body.id,
        name=body.name,
        limits=body.limits(),
        spend_limits=read_spend_limits(body.spend_limits),
        actor=actor,
    )
    return redirect(HOME, done="created")


@router.api_route("/{plan_id}", methods=FORM)
async def change(visitor: AnyVisitor, plans: Plans, plan_id: PlanId) -> Response:
    """Ask for confirmation, then change a plan."""
    plan, form = await plans.get(plan_id), visitor.form
    if not form.is_sent:
        title, texts = f"Plan “{plan.name}”", _texts(plan)
        return visitor.form_page(
            title, [NAME, SPENDING], "Continue", groups=_groups(), values=texts
        )
    body = checked(PlanChange, _values(form))
    limits = body.limits()
    spending = dict.fromkeys(plan.spend_limits) | read_spend_limits(body.spend_limits)
    if not form.is_confirmed:
        count = (await plans.tenants()).get(plan.id, 0)
        return visitor.confirmation(
            "Change the plan",
            title=f"Change the plan “{plan.name}” of {count:,} tenants?",
            facts=dict(_changes(plan, limits, spending)) or {"Limits": "unchanged"},
            text="All gateways apply the limits within a second.",
        )
    await plans.update(
        plan.id,
        name=body.name,
        limits=limits,
        spend_limits=spending,
        actor=visitor.caller.actor,
    )
    return redirect(HOME, done="changed")


def _groups() -> list[Group]:
    return [
        limit_group(scope, text, prefix=f"{scope}_", hint=HINT) for scope, text in _HOLDERS.items()
    ]


def _values(form: Form) -> dict[str, Any]:
    """Return the request body that a form stands for: without a number, there is no limit."""
    limits = {
        f"{scope}_limits": dict.fromkeys(names_of(scope))
        | read_limits(form, scope, is_new=True, prefix=f"{scope}_")
        for scope in LimitScope
    }
    return {"name": form["name"] or None, **limits, "spend_limits": _amounts(form)}


def _amounts(form: Form) -> dict[str, int]:
    """Return the micro-dollars of spend limits. Raises InvalidParameterError."""
    amounts = dict[str, int]()
    for word in form["spend_limits"].split():
        name, _, text = word.rpartition("=")
        micros = read_dollars(text)
        if not name or micros is None or micros < 0:
            raise must("spend_limits", "be NAME=DOLLARS, such as tenant/month=2000", word)
        amounts[name] = micros
    return amounts


def _texts(plan: Plan) -> dict[str, str]:
    texts = {"name": plan.name, "spend_limits": _spending(plan)}
    for scope in LimitScope:
        texts |= fields_of(plan.limits[scope], f"{scope}_")
    return texts


def _summary(scope: LimitScope, plan: Plan) -> str:
    return ", ".join(
        f"{LABELS[name]}: {shown_limit(name, value)}"
        for name, value in plan.limits[scope].items()
        if value is not None
    )


def _spending(plan: Plan) -> str:
    return " ".join(f"{name}={plain_dollars(amount)}" for name, amount in plan.spend_limits.items())


def _changes(
    plan: Plan, limits: Any, spending: Mapping[str, int | None]
) -> Iterator[tuple[str, str]]:
    for each, amount in spending.items():
        if amount != plan.spend_limits.get(each):
            shown = (
                "none" if micros is None else show_dollars(micros)
                for micros in (plan.spend_limits.get(each), amount)
            )
            yield f"Spend limit {each}", " → ".join(shown)
    for scope in LimitScope:
        for name in names_of(scope):
            old, new = plan.limits[scope].get(name), limits[scope].get(name)
            if old != new:
                shown = ("none" if each is None else shown_limit(name, each) for each in (old, new))
                yield f"{LABELS[name]} of each {scope}", " → ".join(shown)
