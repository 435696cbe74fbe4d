"""Aliases of models: their weights and the traffic of each model; define and remove."""

from collections import Counter
from typing import Annotated, Any, Final

from fastapi import APIRouter, Query, Request, Response

from gateway.accounts.aliases import AliasDefinition, Aliases
from gateway.accounts.shared import MAX_TEXT_CHARACTERS
from gateway.console.formats import show_time
from gateway.console.forms import Form, checked
from gateway.console.rendering import confirmation, form_page, page
from gateway.console.routing import FORM, AnyVisitor, OperatorRoute, SentForm, redirect
from gateway.console.tables import Field
from gateway.http.services import AllServices
from gateway.limits.refusal_log import Period, PeriodCounts
from gateway.records.aliases import Alias, Sticky, read_weights

HOME: Final = "/console/aliases"
NOTICES: Final = {
    "defined": "The alias is defined on all gateways within a second.",
    "removed": "The alias is removed from all gateways within a second.",
}
STICKY: Final = [(Sticky.TENANT.value, "each tenant"), (Sticky.USER.value, "each user of a tenant")]
FIELDS: Final = (
    Field("name", "Name", "An alias of this name is replaced.", is_required=True),
    Field("models", "Models", "MODEL=WEIGHT on each line.", "textarea", is_required=True),
    Field("sticky", "Same model for", options=STICKY),
    Field("fallback", "Fallback", "Model of requests whose own has no worker; empty: none."),
    Field("sunset_at", "Requests fail from (UTC)", "Empty: never.", "datetime-local"),
    Field("replacement", "Replacement", "Named by that error; empty: the largest weight's model."),
)
_TIME: Final = "%Y-%m-%dT%H:%M:%S"

router = APIRouter(route_class=OperatorRoute, prefix=HOME, include_in_schema=False)

Name = Annotated[str, Query(max_length=MAX_TEXT_CHARACTERS)]


@router.get("")
async def list_aliases(request: Request, services: AllServices, aliases: Aliases) -> Response:
    """Show each alias with the weights of its models, and their traffic of the last 24 hours."""
    traffic, sums = await services[PeriodCounts].aliases(Period.HOUR), Counter[str]()
    for (alias, _), count in traffic.counts.items():
        sums[alias] += count
    return page(
        request,
        "operators/aliases.html",
        aliases=await aliases.list_all(),
        traffic=traffic,
        sums=sums,
        notices=NOTICES,
    )


@router.api_route("/edit", methods=FORM)
async def define(
    request: Request, aliases: Aliases, visitor: AnyVisitor, form: SentForm, name: Name = ""
) -> Response:
    """Ask for confirmation, then define an alias."""
    if not form.is_sent:
        known = _fields(await aliases.get(name)) if name else {"sticky": Sticky.TENANT.value}
        shown = form or Form.of(known)
        title = f"Alias “{shown['name']}”" if shown["name"] else "New alias"
        return form_page(request, title=title, fields=FIELDS, form=shown, button="Continue")
    body = checked(AliasDefinition, _values(form))
    if not form.is_confirmed:
        return confirmation(
            request,
            title=f"Define the alias “{form['name']}”?",
            facts=_facts(body),
            text="Callers that the weights move get another model from their next request on.",
            button="Define the alias",
            fields=form.confirmed(*(each.name for each in FIELDS)),
        )
    values = {field: getattr(body, field) for field in AliasDefinition.model_fields}
    await aliases.put(form["name"], **values, actor=visitor.principal.actor)
    return redirect(HOME, done="defined")


@router.api_route("/remove", methods=FORM)
async def remove(
    request: Request, aliases: Aliases, visitor: AnyVisitor, form: SentForm, name: Name = ""
) -> Response:
    """Ask for confirmation, then remove an alias."""
    alias = await aliases.get(form["name"] or name)
    if form.is_sent:
        await aliases.remove(alias.name, actor=visitor.principal.actor)
        return redirect(HOME, done="removed")
    return confirmation(
        request,
        title=f"Remove the alias “{alias.name}”?",
        text="Requests for it get 404 within a second. Those that were admitted continue.",
        button="Remove the alias",
        fields={"name": alias.name},
    )


def _values(form: Form) -> dict[str, Any]:
    """Return the request body that a form stands for."""
    sunset_at = form["sunset_at"]
    return {
        "weights": read_weights(form.words("models")),
        "sticky": form["sticky"] or Sticky.TENANT.value,
        "fallback": form["fallback"] or None,
        "sunset_at": f"{sunset_at}Z" if sunset_at else None,
        "replacement": form["replacement"] or None,
    }


def _fields(alias: Alias) -> dict[str, str]:
    return {
        "name": alias.name,
        "models": "\n".join(f"{model}={weight}" for model, weight in alias.weights.items()),
        "sticky": alias.sticky.value,
        "fallback": alias.fallback or "",
        "sunset_at": "" if alias.sunset_at is None else alias.sunset_at.strftime(_TIME),
        "replacement": alias.replacement,
    }


def _facts(body: AliasDefinition) -> dict[str, str]:
    weights = (f"{model}={weight}" for model, weight in body.weights.items())
    return {
        "Models": ", ".join(weights),
        "Same model for": dict(STICKY)[body.sticky.value],
        "Fallback": body.fallback or "none",
        "Requests fail from": "never"
        if body.sunset_at is None
        else f"{show_time(body.sunset_at)} UTC",
        "Replacement": body.replacement or "the model with the largest weight",
    }
