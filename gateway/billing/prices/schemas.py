"""Request and response bodies of prices."""

from datetime import datetime
from typing import Annotated, Literal

from pydantic import AwareDatetime, Field

from contract.tier import ServiceTier
from gateway.accounts.shared import ListBody, Name, RecordBody, RequestBody
from gateway.records.records import MAX_PRICE_MICROS

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
    effective_at: datetime
    created_at: datetime


class PriceList(ListBody[PriceBody]):
    """A list of prices."""
