"""Prices: they are added, never changed, and never apply to the past (`/admin/prices`)."""

from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Literal

from fastapi import APIRouter, Query
from pydantic import AwareDatetime, Field

from contract.tier import ServiceTier
from gateway.accounts.audit.log import SYSTEM
from gateway.accounts.changes import Service, changing
from gateway.accounts.shared import FLAG, ListBody, Name, RecordBody, RequestBody, text_filter
from gateway.http.authorization import CanAdminister, CanSeeEverything
from gateway.http.bounded_route import BoundedRoute
from gateway.http.services import made
from gateway.platform.database.paging import Page, list_records
from gateway.platform.database.tables import PriceRow
from gateway.records.checks import check_name
from gateway.records.errors import InvalidParameterError, must
from gateway.records.records import MAX_PRICE_MICROS, Price
from gateway.records.times import in_utc, utc_now


class PriceService(Service):
    """The price table."""

    async def add(
        self,
        model: str,
        *,
        prompt_micros: int,
        completion_micros: int,
        cached_micros: int | None = None,
        audio_micros: int = 0,
        service_tier: ServiceTier = ServiceTier.DEFAULT,
        effective_at: datetime | None = None,
        actor: str = SYSTEM,
    ) -> Price:
        """Set the price of a model from `effective_at` on, or from now (see `PriceAddition`)."""
        micros = {
            "prompt_micros": prompt_micros,
            "cached_micros": prompt_micros if cached_micros is None else cached_micros,
            "completion_micros": completion_micros,
            "audio_micros": audio_micros,
        }
        check_name(model, param="model")
        _check_micros(micros)
        now = utc_now()
        starts_at = now if effective_at is None else in_utc(effective_at, param="effective_at")
        _check_start(starts_at, now)
        row = PriceRow(
            model=model,
            service_tier=service_tier,
            effective_at=starts_at,
            created_at=now,
            **micros,
        )
        async with changing(self._database, actor=actor) as change:
            await change.insert(row)
            price = row.to_record()
            details = ("service_tier", *micros, "effective_at")
            await change.audit("price.add", model, {name: getattr(price, name) for name in details})
            change.announce(self._announcer.prices_changed)
        return price

    async def list_current(self, model: str | None = None) -> list[Price]:
        """Return the prices in force now, one for each model and tier that has one."""
        now = utc_now()
        current = {
            (price.model, price.service_tier): price
            for price in await self.list_history(model)
            if price.effective_at <= now
        }
        return sorted(current.values(), key=lambda price: (price.model, price.service_tier))

    async def list_history(self, model: str | None = None) -> list[Price]:
        """Return every price, including future ones, in the order in which they take effect."""
        conditions = [] if model is None else [PriceRow.model == model]
        order = ("effective_at", "id")
        async with self._database.reading() as transaction:
            return await list_records(transaction, PriceRow, *conditions, order=order)


def _check_start(starts_at: datetime, now: datetime) -> None:
    if starts_at < now:
        raise InvalidParameterError(
            "'effective_at' must not be in the past, whose usage is already charged. "
            f"Given: {starts_at.isoformat()}.",
            param="effective_at",
        )


def _check_micros(micros: Mapping[str, int]) -> None:
    for name, value in micros.items():
        if not 0 <= value <= MAX_PRICE_MICROS:
            raise must(name, f"be an integer from 0 to {MAX_PRICE_MICROS}", value)
    cached, prompt = micros["cached_micros"], micros["prompt_micros"]
    if cached > prompt:
        raise must("cached_micros", f"be <= 'prompt_micros' ({prompt})", cached)


PriceMicros = Annotated[
    int,
    Field(strict=True, ge=0, le=MAX_PRICE_MICROS, description="Micro-dollars per million tokens."),
]


class PriceAddition(RequestBody):
    """A price to add."""

    model: Name = Field(description="Id under which workers announce the model, not an alias.")
    service_tier: ServiceTier = Field(
        ServiceTier.DEFAULT,
        description="A tier without a price has the price of the default tier.",
    )
    prompt_micros: PriceMicros
    cached_micros: PriceMicros | None = Field(
        None,
        description="For prompt tokens found in the prefix cache, at most `prompt_micros`. "
        "Default: `prompt_micros`.",
    )
    completion_micros: PriceMicros
    audio_micros: PriceMicros = Field(
        0, description="Micro-dollars per million seconds of audio. 0: only its tokens cost."
    )
    effective_at: AwareDatetime | None = Field(
        None, description="When the price takes effect, not in the past. Default: now."
    )


class PriceBody(RecordBody):
    """The price of a model from a point in time: micro-dollars per million tokens."""

    object: Literal["price"] = "price"
    id: int
    model: str
    service_tier: ServiceTier
    prompt_micros: int
    cached_micros: int = Field(description="For prompt tokens found in the prefix cache.")
    completion_micros: int
    audio_micros: int = Field(description="Per million seconds of audio.")
    effective_at: datetime
    created_at: datetime


class PriceList(ListBody[PriceBody]):
    """A list of prices."""


router = APIRouter(prefix="/prices", tags=["Prices"], route_class=BoundedRoute)

PriceTable = Annotated[PriceService, made(PriceService)]


@router.get("", summary="List prices")
async def list_prices(
    table: PriceTable,
    _principal: CanSeeEverything,
    *,
    model: Annotated[str | None, text_filter("Only this model.")] = None,
    history: Annotated[
        bool, Query(strict=True, description="Include past and future prices, in order."), FLAG
    ] = False,
) -> PriceList:
    """List the prices in force, or all prices ever added. A model without a price is free."""
    prices = await (table.list_history(model) if history else table.list_current(model))
    return PriceList.of(Page(prices, has_more=False))


@router.post("", summary="Add a price")
async def add_price(table: PriceTable, principal: CanAdminister, body: PriceAddition) -> PriceBody:
    """Add a price. Prices never change: the price in force at admission applies to a request."""
    return PriceBody.of(await table.add(**dict(body), actor=principal.actor))
