"""Spend limits: list, add, change, raise for a time, and remove."""

from typing import Annotated, Final

from fastapi import APIRouter, Depends, Response

from gateway.accounts.spend_limits import (
    SpendLimitAddition,
    SpendLimitChange,
    SpendLimits,
    SpendLimitUse,
)
from gateway.console.forms import checked, texts_of, values_of
from gateway.console.lists import Newest
from gateway.console.routing import FORM, TenantRoute, needs, redirect
from gateway.console.tables import Action, Cell, Column, Field, pairs
from gateway.console.visitor import Visitor
from gateway.records.limits import SpendScope, Window
from gateway.records.money import show_dollars
from gateway.records.scopes import Scope

TEXT: Final = (
    "The most that a key, member, project, end user or the whole account may spend in a calendar "
    "hour, day, week or month. Requests that could exceed a limit are rejected before they run."
)
AMOUNT: Final = Field("amount_micros", "Amount in dollars", type="dollars", is_required=True)
FIELDS: Final = (
    Field("scope", "Of", options=pairs(SpendScope), is_required=True),
    Field(
        "holder",
        "Key, project, member or end user",
        "Its id; a member's e-mail does not work. Empty: the account, or each end user.",
    ),
    Field("model", "Model", "Full name of a model or adapter. Empty: all models."),
    Field("window", "Per", options=pairs(Window), is_required=True),
    Field("starts_on", "Begins on day", "Of the week (1: Monday) or month.", "number", default="1"),
    AMOUNT,
)
CHANGE: Final = (
    AMOUNT,
    Field("raised_micros", "Raise to, in dollars", "Empty: no raise.", "dollars"),
    Field("raised_until", "Raise until (UTC)", type="datetime-local"),
    Field("raise_reason", "Reason", "The audit log has it."),
)
NOTICES: Final = {
    "added": "The spend limit is added. All gateways enforce it within a second.",
    "changed": "The spend limit is changed on all gateways within a second.",
    "lifted": "The spend limit is lifted for a day.",
    "removed": "The spend limit is removed.",
}

router = APIRouter(route_class=TenantRoute, prefix="/spend-limits", include_in_schema=False)

Manager = Annotated[Visitor, Depends(needs(Scope.KEYS, whole=True))]


@router.get("")
async def list_spend_limits(visitor: Manager, limits: SpendLimits, wanted: Newest) -> Response:
    """List spend limits, newest first."""
    home = f"{visitor.home}/spend-limits"
    return visitor.list_page(
        "Spend limits",
        (
            Column("Of", lambda each: Cell(_name(each), f"{home}/{each.id}"), "name"),
            Column("Model", lambda each: each.limit.model or "all", "wide"),
            Column("Per", lambda each: each.limit.window),
            Column("Amount", lambda each: each.amount_micros, "money"),
            Column("Equal requests", lambda each: each.limit.repeats, "num wide"),
            Column("Spent or reserved", lambda each: each.used_micros, "money"),
            Column("Raised until (UTC)", lambda each: each.limit.raised_until, "time wide"),
            Column("Resets (UTC)", lambda each: each.resets_at, "time wide"),
            Column("Change", lambda each: _change(each, home)),
        ),
        await limits.page(visitor.tenant_id, wanted),
        "There is no spend limit.",
        action=Action("Add a spend limit", f"{home}/new"),
        text=TEXT,
        notices=NOTICES,
    )


@router.api_route("/new", methods=FORM)
async def add(visitor: Manager, limits: SpendLimits) -> Response:
    """Add a spend limit."""
    if not visitor.form.is_sent:
        values = {"scope": SpendScope.KEY.value, "window": Window.DAY.value, "starts_on": "1"}
        return visitor.form_page("New spend limit", FIELDS, "Add the limit", values=values)
    body = checked(SpendLimitAddition, values_of(FIELDS, visitor.form))
    await limits.add(visitor.tenant_id, **body.given(), **visitor.caller.by)
    return redirect(f"{visitor.home}/spend-limits", done="added")


@router.api_route("/{limit_id}", methods=FORM)
async def change(visitor: Manager, limits: SpendLimits, limit_id: str) -> Response:
    """Change the amount of a spend limit, or raise it for a time."""
    use = await limits.get(visitor.tenant_id, limit_id)
    if not visitor.form.is_sent:
        return visitor.form_page(
            f"Spend limit of {_name(use)}",
            CHANGE,
            "Save",
            values=texts_of(CHANGE, use.limit),
            text=_spent(use),
        )
    body = checked(SpendLimitChange, values_of(CHANGE, visitor.form, is_new=False))
    await limits.update(visitor.tenant_id, limit_id, **body.given(), **visitor.caller.by)
    return redirect(f"{visitor.home}/spend-limits", done="changed")


@router.api_route("/{limit_id}/lift", methods=FORM)
async def lift(visitor: Manager, limits: SpendLimits, limit_id: str) -> Response:
    """Ask for confirmation, then lift a spend limit for a day."""
    use = await limits.get(visitor.tenant_id, limit_id)
    if visitor.form.is_sent:
        await limits.lift(visitor.tenant_id, limit_id, **visitor.caller.by)
        return redirect(f"{visitor.home}/spend-limits", done="lifted")
    return visitor.confirmation(
        "Lift the spend limit",
        of=_name(use),
        text="For a day, it rejects no request. Other limits stay.",
    )


@router.api_route("/{limit_id}/remove", methods=FORM)
async def remove(visitor: Manager, limits: SpendLimits, limit_id: str) -> Response:
    """Ask for confirmation, then remove a spend limit."""
    use = await limits.get(visitor.tenant_id, limit_id)
    if visitor.form.is_sent:
        await limits.remove(visitor.tenant_id, limit_id, **visitor.caller.by)
        return redirect(f"{visitor.home}/spend-limits", done="removed")
    return visitor.confirmation(
        "Remove the spend limit",
        of=_name(use),
        text="Requests do not count for it any more. Other limits stay.",
    )


def _change(use: SpendLimitUse, home: str) -> Cell:
    verb = "lift" if use.limit.is_automatic else "remove"
    return Cell(verb, f"{home}/{use.id}/{verb}", label=f"{verb} the limit of {_name(use)}")


def _name(use: SpendLimitUse) -> str:
    limit = use.limit
    if limit.scope is SpendScope.TENANT:
        return "the account"
    return f"{limit.scope} {limit.holder}" if limit.holder else "each end user"


def _spent(use: SpendLimitUse) -> str:
    window = f"the current {use.limit.window}, in the time zone {use.limit.time_zone}"
    if use.used_micros is None:
        return f"Each end user may spend this in {window}."
    return f"{show_dollars(use.used_micros)} are spent or reserved in {window}."
