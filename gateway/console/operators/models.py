"""Models, their queues and workers, and prices."""

import asyncio
from typing import Annotated, Any, Final

from fastapi import APIRouter, Query, Request, Response

from contract.tier import ServiceTier
from gateway.billing.prices import PriceAddition, PriceService
from gateway.console.formats import show_time
from gateway.console.forms import Form, checked
from gateway.console.rendering import confirmation, page
from gateway.console.routing import AnyVisitor, OperatorRoute, SentForm, redirect
from gateway.http.services import AllServices, Services
from gateway.models.catalogue import Catalogue
from gateway.records.errors import ApiError, must
from gateway.records.money import read_dollars, show_dollars

PRICE_FIELDS: Final = (
    ("prompt_micros", "Prompt tokens"),
    ("cached_micros", "Cached prompt tokens"),
    ("completion_micros", "Completion tokens"),
)

router = APIRouter(route_class=OperatorRoute, include_in_schema=False)


@router.get("/console/models")
async def models(request: Request, services: AllServices) -> Response:
    """Show each model with its queue and its workers; htmx loads the page again and again."""
    known = services[Catalogue].models
    names = [each.card.model for each in known]
    found = await asyncio.gather(*map(services[Catalogue].workers, names))
    workers = dict(zip(names, found, strict=True))
    return page(request, "operators/models.html", models=known, workers=workers)


@router.get("/console/prices")
async def prices(
    request: Request,
    services: AllServices,
    *,
    model: Annotated[str, Query(max_length=300)] = "",
    history: bool = False,
    done: bool = False,
) -> Response:
    """Show the prices in force, or all of them."""
    service = _prices(services)
    listed = service.list_history if history else service.list_current
    return page(
        request,
        "operators/prices.html",
        prices=await listed(model or None),
        model=model,
        history=history,
        done=done,
    )


@router.get("/console/prices/new")
async def show_new_price(
    request: Request, services: AllServices, model: Annotated[str, Query(max_length=300)] = ""
) -> Response:
    """Show the form of a new price."""
    return _price_form(request, services, {"model": model})


@router.post("/console/prices/new")
async def add_price(
    request: Request, services: AllServices, visitor: AnyVisitor, form: SentForm
) -> Response:
    """Ask for confirmation, then add the price."""
    try:
        body = checked(PriceAddition, _price_values(form))
        if not form.is_confirmed:
            return confirmation(
                request,
                "/console/prices",
                "new",
                title="Add this price?",
                facts=_facts(body),
                text="It cannot be removed, only followed by another.",
                button="Add the price",
                fields=form.confirmed(
                    "model", "service_tier", *(name for name, _ in PRICE_FIELDS), "effective_at"
                ),
            )
        await _prices(services).add(
            body.model,
            prompt_micros=body.prompt_micros,
            cached_micros=body.cached_micros,
            completion_micros=body.completion_micros,
            service_tier=body.service_tier,
            effective_at=body.effective_at,
            actor=visitor.principal.actor,
        )
    except ApiError as error:
        return _price_form(request, services, {name: form[name] for name in form}, error=error)
    return redirect("/console/prices", model=body.model, history="true", done="true")


def _facts(body: PriceAddition) -> dict[str, str]:
    cached = body.prompt_micros if body.cached_micros is None else body.cached_micros
    prices = (body.prompt_micros, cached, body.completion_micros)
    at = body.effective_at
    return {
        "Model": f"{body.model}, tier {body.service_tier}",
        **{
            label: f"{show_dollars(micros)} per million"
            for (_, label), micros in zip(PRICE_FIELDS, prices, strict=True)
        },
        "From": "at once" if at is None else f"{show_time(at)} UTC",
    }


def _price_form(
    request: Request, services: Services, form: dict[str, str], error: ApiError | None = None
) -> Response:
    return page(
        request,
        "operators/price.html",
        status=200 if error is None else error.status,
        form=Form({name: [value] for name, value in form.items()}),
        fields=PRICE_FIELDS,
        tiers=[(tier.value, tier.value) for tier in ServiceTier],
        models=sorted(services[Catalogue].names),
        error=error,
    )


def _price_values(form: Form) -> dict[str, Any]:
    values: dict[str, Any] = {
        "model": form["model"],
        "service_tier": form["service_tier"] or ServiceTier.DEFAULT,
    }
    for name, label in PRICE_FIELDS:
        if not form[name] and name == "cached_micros":
            continue
        micros = read_dollars(form[name])
        if micros is None:
            raise must(label, "be an amount in dollars such as 0.15", form[name], param=name)
        values[name] = micros
    if form["effective_at"]:
        values["effective_at"] = f"{form['effective_at']}Z"
    return values


def _prices(services: Services) -> PriceService:
    return services.make(PriceService)
