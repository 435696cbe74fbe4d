"""Prices of models and adapters: those in force, future and past ones; add and remove them."""

from collections.abc import Collection, Iterator, Mapping
from datetime import datetime
from operator import attrgetter
from typing import Annotated, Final, NamedTuple
from urllib.parse import urlencode

from fastapi import APIRouter, Query, Response

from contract.tier import ServiceTier
from gateway.accounts.routes_common import PLAIN
from gateway.adapters.routes import Adapters
from gateway.billing.prices import PriceAddition, PriceTable
from gateway.console.formats import show_time
from gateway.console.forms import checked, values_of
from gateway.console.routing import FORM, AnyVisitor, OperatorRoute, redirect
from gateway.console.tables import Action, Cell, Column, Field, Search, Step, pairs
from gateway.http.services import AllServices, Services
from gateway.models.alias_and_adapter_caches import AliasBook
from gateway.models.catalogue import Catalogue
from gateway.models.price_book import courses_of
from gateway.platform.database.paging import PageRequest
from gateway.records.money import show_dollars
from gateway.records.records import Price
from gateway.records.times import utc_now

HOME: Final = "/console/prices"
MOST_ADAPTERS: Final = 200
"""Adapters whose names are known, the newest ones; prices name others by their ids."""
AMOUNTS: Final = (
    ("prompt_micros", "Prompt tokens"),
    ("cached_micros", "Cached prompt tokens"),
    ("completion_micros", "Completion tokens"),
    ("audio_micros", "Seconds of audio"),
)
OPTIONAL: Final = {
    "cached_micros": "Dollars per million tokens; empty: as other prompt tokens.",
    "audio_micros": "Dollars per million seconds; empty: none.",
}
"""Hints of the amounts that may be left out."""
NOTICES: Final = {
    "added": "The price is added. It applies to requests that are admitted from then on.",
    "removed": "The price is removed. What was charged stays charged.",
}
SEARCH: Final = (
    Field("model", "Model"),
    Field("history", "Past and removed prices too", type="checkbox"),
)
MODEL: Final = Field("model", "Model", type="name", is_required=True)
AMOUNT_FIELDS: Final = [
    Field(
        name,
        label,
        OPTIONAL.get(name, "Dollars per million tokens."),
        "dollars",
        is_required=name not in OPTIONAL,
    )
    for name, label in AMOUNTS
]

TIER: Final = Field(
    "service_tier", "Service tier", options=pairs(ServiceTier), default=ServiceTier.DEFAULT.value
)
EFFECTIVE: Final = Field("effective_at", "From (UTC)", "Empty: at once.", "datetime-local")
FIELDS: Final = (TIER, *AMOUNT_FIELDS, EFFECTIVE)

router = APIRouter(route_class=OperatorRoute, prefix=HOME, include_in_schema=False)

Model = Annotated[str, Query(max_length=300)]
PriceId = Annotated[int, PLAIN, Query(ge=1, lt=2**63)]


class _Listed(NamedTuple):
    price: Price
    state: Cell


@router.get("")
async def list_prices(
    visitor: AnyVisitor,
    services: AllServices,
    table: PriceTable,
    adapters: Adapters,
    *,
    model: Model = "",
    history: bool = False,
) -> Response:
    """Show the prices in force and future ones, or all of them; and the models without any."""
    listed = _listed(await table.list_history(model or None), utc_now())
    newest = PageRequest(None, MOST_ADAPTERS, is_newest_first=True)
    names = {each.id: each.full_name for each in (await adapters.page_of_all(newest)).entries}
    priced = {each.price.model for each in listed if each.state.text == "in force"}
    known = services[Catalogue].names
    free = [
        Step(each, f"{HOME}/new?{_query(each)}", "Add a price", f"Add a price of {each}")
        for each in sorted(known - priced)
        if model in ("", each)
    ]
    return visitor.list_page(
        "Prices",
        _columns(names, known, may_remove=visitor.may_change),
        [each for each in listed if history or each.state.kind != "muted"],
        "There is no price.",
        action=Action("Add a price", f"{HOME}/new{f'?{_query(model)}' if model else ''}"),
        search=Search(SEARCH, {"model": model, "history": "yes" if history else ""}),
        text="Dollars per million tokens. A tier without a price has the price of the default "
        "tier.",
        missing=("Models without a price are free", free),
        notices=NOTICES,
    )


@router.api_route("/new", methods=FORM)
async def add(
    visitor: AnyVisitor, services: AllServices, table: PriceTable, model: Model = ""
) -> Response:
    """Ask for confirmation, with a warning for an unknown model, then add a price."""
    form, names = visitor.form, services[Catalogue].names
    if not form.is_sent:
        return visitor.form_page(
            "New price",
            [MODEL._replace(options=pairs(sorted(names))), *FIELDS],
            "Continue",
            values={"model": model},
            text="A price applies to requests that are admitted from its start on.",
        )
    body = checked(PriceAddition, values_of([MODEL, *FIELDS], form))
    if not form.is_confirmed:
        return visitor.confirmation(
            "Add the price",
            title="Add this price?",
            warning=_warning(services, body.model),
            facts=_facts(body),
            text="A price never changes. Another one may follow it.",
        )
    await table.add(**dict(body), actor=visitor.caller.actor)
    return redirect(HOME, model=body.model, done="added")


@router.api_route("/remove", methods=FORM)
async def remove(visitor: AnyVisitor, table: PriceTable, price: PriceId) -> Response:
    """Ask for confirmation, then remove a price."""
    asked = await table.get(price)
    if visitor.form.is_sent:
        await table.remove(price, actor=visitor.caller.actor)
        return redirect(HOME, model=asked.model, done="removed")
    return visitor.confirmation(
        "Remove the price",
        title="Remove this price?",
        facts=_facts(asked),
        text="Requests that are admitted from then on have the price of the default tier, or are "
        "free. What was charged stays charged. A future price never applies.",
        back=f"{HOME}?{_query(asked.model)}",
    )


def _listed(prices: Collection[Price], now: datetime) -> list[_Listed]:
    """Return prices by model and tier, each model with its latest price first."""
    courses, listed = courses_of(prices), list[_Listed]()
    for price in sorted(prices, key=attrgetter("effective_at", "id"), reverse=True):
        applied = courses[price.model, price.service_tier].at(max(now, price.effective_at))
        if applied is not price:
            state = Cell("past" if price.removed_at is None else "removed", kind="muted")
        elif price.effective_at > now:
            state = Cell("future", kind="warn")
        else:
            state = Cell("in force", kind="good")
        listed.append(_Listed(price, state))
    return sorted(listed, key=attrgetter("price.model", "price.service_tier"))


def _columns(
    names: Mapping[str, str], known: Collection[str], *, may_remove: bool
) -> Iterator[Column]:
    def name(each: _Listed) -> Cell:
        model = each.price.model
        is_unknown = model not in known and model not in names
        text = f"{names.get(model, model)}{' (unknown)' if is_unknown else ''}"
        return Cell(text, f"{HOME}?{_query(model)}&history=true", "warn" if is_unknown else "")

    def removal(each: _Listed) -> Cell:
        if each.state.kind == "muted":
            return Cell("")
        label = f"Remove the price of {each.price.model}"
        return Cell("Remove", f"{HOME}/remove?price={each.price.id}", label=label)

    yield Column("Model", name, "name")
    yield Column("Tier", lambda each: each.price.service_tier, "wide")
    for (amount, _), title in zip(
        AMOUNTS, ("Prompt", "Cached", "Completion", "Audio"), strict=True
    ):
        kind = "price wide" if amount in OPTIONAL else "price"
        yield Column(title, attrgetter(f"price.{amount}"), kind)
    yield Column("From (UTC)", lambda each: each.price.effective_at, "time wide")
    yield Column("State", lambda each: each.state)
    if may_remove:
        yield Column("", removal)


def _query(model: str) -> str:
    return urlencode({"model": model})


def _warning(services: Services, model: str) -> str:
    """Return what is wrong with the name of a model; empty if it is known."""
    if model in services[Catalogue].names:
        return ""
    alias = services[AliasBook].find(model)
    if alias is not None or services[Catalogue].known(model) is not None:
        return f"{model} is an alias: its requests have the prices of its models."
    return f"No worker has announced the model {model}. Check the name."


def _facts(body: PriceAddition | Price) -> dict[str, str]:
    cached = body.prompt_micros if body.cached_micros is None else body.cached_micros
    prices = (body.prompt_micros, cached, body.completion_micros, body.audio_micros)
    at = body.effective_at
    return {
        "Model": f"{body.model}, tier {body.service_tier}",
        **{
            label: f"{show_dollars(micros)} per million"
            for (_, label), micros in zip(AMOUNTS, prices, strict=True)
        },
        "From": "at once" if at is None else f"{show_time(at)} UTC",
    }
