"""Aliases of models: their weights and the traffic of each model; define and remove."""

from collections import Counter
from typing import Annotated, Final

from fastapi import APIRouter, Query, Response

from gateway.accounts.aliases import AliasDefinition, Aliases
from gateway.accounts.routes_common import MAX_TEXT_CHARACTERS
from gateway.console.formats import show_time
from gateway.console.forms import Form, checked, texts_of, values_of
from gateway.console.routing import FORM, AnyVisitor, OperatorRoute, redirect
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
    Field("sticky", "Same model for", options=STICKY, default=Sticky.TENANT.value),
    Field("fallback", "Fallback", "Model of requests that their own cannot run; empty: none."),
    Field("fallbacks", "Further fallbacks", "Tried in order, one on each line.", "textarea"),
    Field("sunset_at", "Requests fail from (UTC)", "Empty: never.", "datetime-local"),
    Field("replacement", "Replacement", "Named by that error; empty: the largest weight's model."),
)

router = APIRouter(route_class=OperatorRoute, prefix=HOME, include_in_schema=False)

Name = Annotated[str, Query(max_length=MAX_TEXT_CHARACTERS)]


@router.get("")
async def list_all(visitor: AnyVisitor, services: AllServices, aliases: Aliases) -> Response:
    """Show each alias with the weights of its models, and their traffic of the last 24 hours."""
    traffic, sums = await services[PeriodCounts].aliases(Period.HOUR), Counter[str]()
    for (alias, _), count in traffic.counts.items():
        sums[alias] += count
    return visitor.page(
        "operators/aliases.html",
        aliases=await aliases.list_all(),
        traffic=traffic,
        sums=sums,
        notices=NOTICES,
    )


@router.api_route("/edit", methods=FORM)
async def define(visitor: AnyVisitor, aliases: Aliases, name: Name = "") -> Response:
    """Ask for confirmation, then define an alias."""
    form = visitor.form
    if not form.is_sent:
        known = _texts(await aliases.get(name)) if name else {}
        shown = form or Form.of(known)
        title = f"Alias “{shown['name']}”" if shown["name"] else "New alias"
        return visitor.form_page(title, FIELDS, "Continue", values=shown)
    values = values_of(FIELDS[2:], form) | {
        "weights": read_weights(form.words("models")),
        "fallbacks": form.words("fallbacks"),
    }
    body = checked(AliasDefinition, values)
    if not form.is_confirmed:
        return visitor.confirmation(
            "Define the alias",
            of=form["name"],
            facts=_facts(body),
            text="Callers that the weights move get another model from their next request on.",
        )
    await aliases.put(form["name"], **dict(body), actor=visitor.caller.actor)
    return redirect(HOME, done="defined")


@router.api_route("/remove", methods=FORM)
async def remove(visitor: AnyVisitor, aliases: Aliases, name: Name = "") -> Response:
    """Ask for confirmation, then remove an alias."""
    alias = await aliases.get(visitor.form["name"] or name)
    if visitor.form.is_sent:
        await aliases.remove(alias.name, actor=visitor.caller.actor)
        return redirect(HOME, done="removed")
    return visitor.confirmation(
        "Remove the alias",
        of=alias.name,
        text="Requests for it get 404 within a second. Those that were admitted continue.",
        fields={"name": alias.name},
    )


def _texts(alias: Alias) -> dict[str, str]:
    models = (f"{model}={weight}" for model, weight in alias.weights.items())
    return texts_of(FIELDS, alias, models="\n".join(models), fallbacks="\n".join(alias.fallbacks))


def _facts(body: AliasDefinition) -> dict[str, str]:
    weights = (f"{model}={weight}" for model, weight in body.weights.items())
    return {
        "Models": ", ".join(weights),
        "Same model for": dict(STICKY)[body.sticky.value],
        "Fallback": ", ".join(filter(None, (body.fallback, *body.fallbacks))) or "none",
        "Requests fail from": "never"
        if body.sunset_at is None
        else f"{show_time(body.sunset_at)} UTC",
        "Replacement": body.replacement or "the model with the largest weight",
    }
