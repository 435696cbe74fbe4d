"""Request and response bodies of plans, prices and credits."""

from datetime import datetime
from typing import Annotated, Any, Final, Literal, Self

from pydantic import AwareDatetime, BaseModel, Field, WithJsonSchema

from contract.tier import ServiceTier
from gateway.accounts.credit_checks import MAX_AMOUNT_MICROS, MAX_NOTE_CHARACTERS
from gateway.accounts.credit_service import Balance
from gateway.accounts.limits import MAX_LIMIT, LimitName, LimitScope, LimitValues, read_limits
from gateway.accounts.paging import Page
from gateway.accounts.plan_service import ScopedLimits
from gateway.accounts.price_service import MAX_PRICE_MICROS
from gateway.accounts.records import Credit, CreditKind, Plan, Price
from gateway.api.fields import Given, ListBody, Name

_LIMIT: Final = {
    "anyOf": [{"type": "integer", "minimum": 0, "maximum": MAX_LIMIT}, {"type": "null"}]
}
_LIMITS: Final = {
    "type": "object",
    "additionalProperties": False,
    "properties": {name.value: _LIMIT for name in LimitName},
}

PlanLimits = Annotated[
    dict[str, Any],
    WithJsonSchema(_LIMITS),
    Field(description="Limits of who has none of his own; null and what is absent: no limit."),
]
PriceMicros = Annotated[
    int,
    Field(strict=True, ge=0, le=MAX_PRICE_MICROS, description="Micro-dollars per million tokens."),
]
AmountMicros = Annotated[
    int,
    Field(
        strict=True,
        ge=-MAX_AMOUNT_MICROS,
        le=MAX_AMOUNT_MICROS,
        description="Micro-dollars; only an adjustment may be negative.",
    ),
]


class _PlanLimits(Given):
    tenant_limits: PlanLimits = Field(default_factory=dict)
    project_limits: PlanLimits = Field(default_factory=dict)
    key_limits: PlanLimits = Field(default_factory=dict)

    def limits(self) -> ScopedLimits:
        """Return the limits by scope. Raises InvalidParameterError."""
        return {
            scope: read_limits(getattr(self, f"{scope}_limits"), param=f"{scope}_limits")
            for scope in LimitScope
        }


class PlanCreation(_PlanLimits):
    """A plan to create."""

    id: str = Field(
        min_length=1, max_length=63, description="1 to 63 characters out of a-z, 0-9 and `-`."
    )
    name: Name | None = Field(None, description="The id if absent.")


class PlanChange(_PlanLimits):
    """Changes to a plan; absent fields stay unchanged."""

    name: Name | None = None


class PlanBody(BaseModel):
    """A plan: default limits for every holder without its own."""

    object: Literal["plan"] = "plan"
    id: str
    name: str
    tenant_limits: PlanLimits
    project_limits: PlanLimits
    key_limits: PlanLimits
    created_at: datetime

    @classmethod
    def of(cls, plan: Plan) -> Self:
        """Return the response body of a plan."""
        return cls(
            id=plan.id,
            name=plan.name,
            tenant_limits=_shown(plan.limits[LimitScope.TENANT]),
            project_limits=_shown(plan.limits[LimitScope.PROJECT]),
            key_limits=_shown(plan.limits[LimitScope.KEY]),
            created_at=plan.created_at,
        )


def _shown(limits: LimitValues) -> dict[str, int | None]:
    return {name.value: value for name, value in limits.items()}


class PlanList(ListBody[PlanBody]):
    """All plans, oldest first."""


class PriceAddition(Given):
    """A price to add."""

    model: Name = Field(description="Id under which workers announce the model, not an alias.")
    service_tier: ServiceTier = Field(
        ServiceTier.DEFAULT,
        description="Tiers without a price of their own cost what the default one does.",
    )
    prompt_micros: PriceMicros
    cached_micros: PriceMicros | None = Field(
        None,
        description="For prompt tokens found in the prefix cache, at most `prompt_micros`, which also holds if absent.",
    )
    completion_micros: PriceMicros
    effective_at: AwareDatetime | None = Field(
        None, description="From when on, never in the past; from now on if absent."
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


class CreditAddition(Given):
    """A change of a prepaid balance."""

    kind: Literal[CreditKind.GRANT, CreditKind.ADJUSTMENT] = CreditKind.GRANT
    amount_micros: AmountMicros
    note: str = Field(
        "",
        max_length=MAX_NOTE_CHARACTERS,
        description="What it is for; an adjustment must have one.",
    )
    expires_at: AwareDatetime | None = Field(
        None, description="When what is left of a grant is taken back; null stands for never."
    )


class CreditBody(BaseModel):
    """One change of a prepaid balance."""

    object: Literal["credit"] = "credit"
    id: str
    tenant_id: str
    kind: CreditKind
    amount_micros: int = Field(description="Micro-dollars; negative where something is taken away.")
    note: str
    created_at: datetime
    expires_at: datetime | None
    grant_id: str | None = Field(description="The grant that an expiry ends.")

    @classmethod
    def of(cls, credit: Credit) -> Self:
        """Return the response body of a change."""
        return cls(
            id=credit.id,
            tenant_id=credit.tenant_id,
            kind=credit.kind,
            amount_micros=credit.amount_micros,
            note=credit.note,
            created_at=credit.created_at,
            expires_at=credit.expires_at,
            grant_id=credit.grant_id,
        )


class BalanceBody(BaseModel):
    """A tenant's balance in the ledger, which records usage a few seconds after a request ends."""

    granted_micros: int = Field(description="Grants and adjustments, less what was taken back.")
    spent_micros: int
    balance_micros: int = Field(description="What is left; negative: a debt.")

    @classmethod
    def of(cls, balance: Balance) -> Self:
        """Return the response body of a balance."""
        return cls(
            granted_micros=balance.granted_micros,
            spent_micros=balance.spent_micros,
            balance_micros=balance.micros,
        )


class CreditList(ListBody[CreditBody]):
    """A page of balance changes, oldest first."""

    balance: BalanceBody

    @classmethod
    def of(cls, page: Page[Credit], balance: Balance) -> Self:
        """Return the response body of a page."""
        return cls(
            data=[CreditBody.of(each) for each in page.entries],
            has_more=page.has_more,
            balance=BalanceBody.of(balance),
        )
