"""Request and response bodies of tenants."""

from datetime import datetime
from typing import Annotated, Literal

from pydantic import Field

from contract.dialect import Dialect
from contract.tier import RequestTier, ServiceTier
from gateway.accounts.shared.fields import (
    BodyWithLimits,
    LimitsGiven,
    LimitsShown,
    ListBody,
    Name,
    RecordBody,
)
from gateway.accounts.tenants.service import MAX_WEIGHT, MIN_WEIGHT, STRIPE_CUSTOMER
from gateway.records.origins import MAX_ORIGIN_CHARACTERS, MAX_ORIGINS
from gateway.records.records import Billing, TenantStatus

Weight = Annotated[
    float,
    Field(
        strict=True,
        ge=MIN_WEIGHT,
        le=MAX_WEIGHT,
        description="Share of the workers relative to other tenants with waiting jobs.",
    ),
]
PlanId = Annotated[
    str | None,
    Field(max_length=63, description="Plan whose limits apply where no own limit is set."),
]
DefaultModel = Annotated[Name | None, Field(description="Default for requests that specify none.")]
TenantDialect = Annotated[
    Dialect | None, Field(description="Default for requests that specify none.")
]


CorsOrigins = Annotated[
    list[Annotated[str, Field(max_length=MAX_ORIGIN_CHARACTERS)]],
    Field(
        max_length=MAX_ORIGINS,
        description="Origins of web pages that may use the account's keys; `*`: any.",
        examples=[["https://app.example.com"]],
    ),
]
StripeCustomer = Annotated[
    str | None,
    Field(
        max_length=255,
        pattern=STRIPE_CUSTOMER,
        description="Customer in Stripe to whom the tenant's usage is exported.",
        examples=["cus_NciAYcXfLnqBoz"],
    ),
]


class TenantCreation(BodyWithLimits):
    """A tenant to create."""

    name: Name
    id: str | None = Field(
        None,
        max_length=63,
        description="1 to 63 characters from a-z, 0-9 and `-`. Default: random.",
    )
    weight: Weight = 1.0
    dialect: TenantDialect = None
    strict_parameters: bool = Field(
        default=False,
        strict=True,
        description="Reject parameters without effect instead of listing them.",
    )
    default_model: DefaultModel = None
    plan_id: PlanId = None
    limits: LimitsGiven = Field(default_factory=dict)
    billing: Billing = Billing.POSTPAID
    service_tier: RequestTier = Field(
        ServiceTier.DEFAULT, description="Default for requests that specify none."
    )
    shows_cost: bool = Field(
        default=False, strict=True, description="Whether responses include their cost."
    )
    cors_origins: CorsOrigins = Field(default_factory=list)
    stripe_customer_id: StripeCustomer = None


class TenantChange(BodyWithLimits):
    """Changes to a tenant; absent fields stay unchanged."""

    name: Name = Field(default_factory=str)
    weight: Weight = Field(default_factory=float)
    dialect: TenantDialect = None
    strict_parameters: bool = Field(default_factory=bool, strict=True)
    default_model: DefaultModel = None
    plan_id: PlanId = None
    limits: LimitsGiven = Field(default_factory=dict)
    billing: Billing = Field(default_factory=lambda: Billing.POSTPAID)
    service_tier: RequestTier = Field(default_factory=lambda: ServiceTier.DEFAULT)
    shows_cost: bool = Field(default_factory=bool, strict=True)
    cors_origins: CorsOrigins = Field(default_factory=list)
    stripe_customer_id: StripeCustomer = None


class TenantBody(RecordBody):
    """A tenant."""

    object: Literal["tenant"] = "tenant"
    id: str
    name: str
    weight: float
    status: TenantStatus
    dialect: Dialect | None
    strict_parameters: bool
    default_model: str | None
    plan_id: str | None
    limits: LimitsShown
    billing: Billing
    service_tier: ServiceTier
    shows_cost: bool
    cors_origins: list[str]
    stripe_customer_id: str | None
    created_at: datetime


class TenantList(ListBody[TenantBody]):
    """A page of tenants, oldest first."""
