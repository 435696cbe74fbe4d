"""Model prices: `/admin/prices`."""

from typing import Annotated

from fastapi import APIRouter, Query

from gateway.accounts.shared import FLAG, text_filter
from gateway.billing.prices.schemas import PriceAddition, PriceBody, PriceList
from gateway.billing.prices.service import PriceService
from gateway.http.authorization import CanAdminister, CanSeeEverything
from gateway.http.bounded_route import BoundedRoute
from gateway.http.services import made
from gateway.platform.database.paging import Page

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
