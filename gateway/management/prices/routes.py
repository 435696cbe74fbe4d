"""Model prices: `/admin/prices`."""

from typing import Annotated

from fastapi import APIRouter, Query

from gateway.database.paging import Page
from gateway.http.authorization import CanAdminister, CanSeeEverything, Context
from gateway.http.bounded_route import BoundedRoute
from gateway.http.context import ProcessContext
from gateway.management.prices.schemas import PriceAddition, PriceBody, PriceList
from gateway.management.prices.service import PriceService
from gateway.management.shared.parameters import text_filter

router = APIRouter(prefix="/prices", tags=["Prices"], route_class=BoundedRoute)


@router.get("", summary="List prices")
async def list_prices(
    context: Context,
    _principal: CanSeeEverything,
    *,
    model: Annotated[str | None, text_filter("Only this model.")] = None,
    history: Annotated[
        bool, Query(description="Include past and future prices, in order.")
    ] = False,
) -> PriceList:
    """List the prices in force, or all prices ever added. A model without a price is free."""
    service = _service(context)
    prices = await (service.list_history(model) if history else service.list_current(model))
    return PriceList.of(Page(prices, has_more=False))


@router.post("", summary="Add a price")
async def add_price(context: Context, principal: CanAdminister, body: PriceAddition) -> PriceBody:
    """Add a price. Prices never change: the price in force at admission applies to a request."""
    price = await _service(context).add(
        body.model,
        prompt_micros=body.prompt_micros,
        cached_micros=body.cached_micros,
        completion_micros=body.completion_micros,
        service_tier=body.service_tier,
        effective_at=body.effective_at,
        actor=principal.actor,
    )
    return PriceBody.of(price)


def _service(context: ProcessContext) -> PriceService:
    return PriceService(context.database, context.announcer)
