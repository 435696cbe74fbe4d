"""Prices: they are added and removed, and never change what the past cost (`/admin/prices`)."""

from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from typing import Annotated, Final, Literal

from fastapi import Path, Query
from pydantic import AwareDatetime, Field
from sqlalchemy.ext.asyncio import AsyncSession

from contract.tier import ServiceTier
from gateway.accounts.audit.log import SYSTEM
from gateway.accounts.changes import Service, changing
from gateway.accounts.routes_common import (
    FLAG,
    PLAIN,
    ListBody,
    Name,
    RecordBody,
    RequestBody,
    text_filter,
)
from gateway.http.authorization import Operator, operators_router
from gateway.http.services import made
from gateway.models.price_book import courses_of
from gateway.platform.database.paging import Page, list_records
from gateway.platform.database.tables import PriceRemovalRow, PriceRow
from gateway.platform.database.tables.base import record_of
from gateway.records.checks import check_name
from gateway.records.errors import (
    InvalidParameterError,
    NotFoundError,
    StateConflictError,
    must,
)
from gateway.records.records import MAX_PRICE_MICROS, Price
from gateway.records.times import in_utc, utc_now

_ORDER: Final = ("effective_at", "id")
"""Of two prices with one start, the one that was added last applies."""


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
            price = record_of(row, Price, removed_at=None)
            details = ("service_tier", *micros, "effective_at")
            await change.audit("price.add", model, {name: getattr(price, name) for name in details})
            change.announce(self._announcer.prices_changed)
        return price

    async def remove(self, price_id: int, *, actor: str = SYSTEM) -> Price:
        """Let a price apply no longer, or never if it is a future one.

        Raises:
            NotFoundError: There is no such price.
            StateConflictError: It is removed already, or a later price has replaced it.
        """
        now = utc_now()
        conflict = f"The price {price_id} is removed already."
        async with changing(self._database, actor=actor, conflict=conflict) as change:
            price = await _get(change.transaction, price_id)
            if price.removed_at is not None:
                raise StateConflictError(conflict)
            of_model = await list_records(
                change.transaction, PriceRow, PriceRow.model == price.model, order=_ORDER
            )
            course = courses_of(of_model)[price.model, price.service_tier]
            if course.at(max(now, price.effective_at)) != price:
                raise StateConflictError(
                    f"The price {price_id} cannot be removed: a later one has replaced it."
                )
            await change.insert(PriceRemovalRow(price_id=price_id, removed_at=now))
            details = {"price": price_id, "service_tier": price.service_tier}
            await change.audit("price.remove", price.model, details)
            change.announce(self._announcer.prices_changed)
        return replace(price, removed_at=now)

    async def get(self, price_id: int) -> Price:
        """Return a price. Raises NotFoundError."""
        async with self._database.reading() as transaction:
            return await _get(transaction, price_id)

    async def list_current(self, model: str | None = None) -> list[Price]:
        """Return the prices in force now, one for each model and tier that has one."""
        now = utc_now()
        courses = courses_of(await self.list_history(model))
        return [price for key in sorted(courses) if (price := courses[key].at(now)) is not None]

    async def list_history(self, model: str | None = None) -> list[Price]:
        """Return every price ever added, in the order in which they take effect."""
        conditions = [] if model is None else [PriceRow.model == model]
        async with self._database.reading() as transaction:
            return await list_records(transaction, PriceRow, *conditions, order=_ORDER)


async def _get(transaction: AsyncSession, price_id: int) -> Price:
    row = await transaction.get(PriceRow, price_id)
    if row is None:
        raise NotFoundError(f"There is no price {price_id}.")
    return row.to_record()


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
    removed_at: datetime | None = Field(
        description="When it was removed; before `effective_at`, it never applies."
    )


router = operators_router("Prices", "/prices")

PriceTable = Annotated[PriceService, made(PriceService)]


@router.get("", summary="List prices", response_model=ListBody[PriceBody])
async def list_prices(
    table: PriceTable,
    *,
    model: Annotated[str | None, text_filter("Only this model.")] = None,
    history: Annotated[
        bool,
        Query(strict=True, description="Include past, future and removed prices, in order."),
        FLAG,
    ] = False,
) -> Page[Price]:
    """List the prices in force, or all prices ever added. A model without a price is free."""
    prices = await (table.list_history(model) if history else table.list_current(model))
    return Page(prices, has_more=False)


@router.post("", summary="Add a price", response_model=PriceBody)
async def add_price(table: PriceTable, operator: Operator, body: PriceAddition) -> Price:
    """Add a price. Prices never change: the price in force at admission applies to a request."""
    return await table.add(**dict(body), actor=operator.actor)


@router.delete("/{price}", summary="Remove a price", response_model=PriceBody)
async def remove_price(
    table: PriceTable,
    operator: Operator,
    price: Annotated[int, Path(ge=1, lt=2**63, description="Id of the price."), PLAIN],
) -> Price:
    """Remove the price in force, from now on, or a future one. What was charged stays charged.

    Its tier then has the price of the default tier. A model without a price there is free.
    """
    return await table.remove(price, actor=operator.actor)
