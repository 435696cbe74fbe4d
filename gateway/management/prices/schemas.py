"""Request and response bodies of prices."""

from datetime import datetime
from typing import Annotated, Literal, Self

from pydantic import AwareDatetime, BaseModel, Field

from contract.tier import ServiceTier
from gateway.management.prices.service import MAX_PRICE_MICROS
from gateway.management.shared.fields import ListBody, Name, RequestBody
from gateway.tenancy.records import Price

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


class PriceBody(BaseModel):
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

    @classmethod
    def of(cls, price: Price) -> Self:
        """Return the response body of a price."""
        return cls(
            id=price.id,
            model=price.model,
            service_tier=price.service_tier,
            prompt_micros=price.prompt_micros,
            cached_micros=price.cached_micros,
            completion_micros=price.completion_micros,
            effective_at=price.effective_at,
            created_at=price.created_at,
        )


class PriceList(ListBody[PriceBody]):
    """A list of prices."""
