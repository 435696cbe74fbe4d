"""Tenants, for operators: `/admin/tenants`."""

from datetime import datetime
from typing import Annotated, Literal

from pydantic import Field

from contract.dialect import Dialect
from contract.tier import RequestTier, ServiceTier
from gateway.accounts.routes_common import (
    BodyWithLimits,
    ChangeBody,
    DisplayName,
    ListBody,
    Name,
    RecordBody,
    TenantId,
    TenantLimitsGiven,
    TenantLimitsShown,
    WantedPage,
    text_filter,
)
from gateway.accounts.tenants.service import MAX_WEIGHT, MIN_WEIGHT, STRIPE_CUSTOMER, TenantService
from gateway.http.authorization import Operator, operators_router
from gateway.http.services import made
from gateway.platform.database.paging import Page
from gateway.records.checks import MAX_ORIGIN_CHARACTERS, MAX_ORIGINS
from gateway.records.limits import LimitScope
from gateway.records.records import AnomalyAction, Billing, Tenant, TenantStatus

Weight = Annotated[
    float,
    Field(
        strict=True,
        ge=MIN_WEIGHT,
        le=MAX_WEIGHT,
        description="Share of the workers relative to other tenants with waiting jobs.",
    ),
]


class _TenantOptions(BodyWithLimits):
    holder = LimitScope.TENANT
    limits: TenantLimitsGiven = Field(default_factory=dict)
    dialect: Dialect | None = Field(None, description="Dialect of requests that specify none.")
    default_model: Name | None = Field(None, description="Model of requests that specify none.")
    plan_id: str | None = Field(
        None, max_length=63, description="Plan whose limits apply where no own limit is set."
    )
    cors_origins: list[Annotated[str, Field(max_length=MAX_ORIGIN_CHARACTERS)]] = Field(
        default_factory=list,
        max_length=MAX_ORIGINS,
        description="Origins of web pages that may use the account's keys; `*`: any.",
        examples=[["https://app.example.com"]],
    )
    stripe_customer_id: str | None = Field(
        None,
        max_length=255,
        pattern=STRIPE_CUSTOMER,
        description="Customer in Stripe to whom the tenant's usage is exported.",
        examples=["cus_NciAYcXfLnqBoz"],
    )
    time_zone: str = Field(
        "UTC",
        max_length=63,
        description="IANA name of the time zone in which windows of spend limits begin.",
        examples=["Europe/Paris"],
    )
    anomaly_factor: int | None = Field(
        None,
        strict=True,
        ge=2,
        le=1_000,
        description="A key that spends so many times of what it usually spends in an hour is an "
        "anomaly. Null: none is.",
    )
    anomaly_repeats: int | None = Field(
        None,
        strict=True,
        ge=2,
        le=1_000_000,
        description="A key that sends one request more often than this in an hour is an anomaly. "
        "Null: none is.",
    )
    anomaly_action: AnomalyAction = Field(
        AnomalyAction.STOP,
        description="`stop` rejects further requests of such a key in the hour; `report` does not.",
    )
    weight: Weight = 1.0
    strict_parameters: bool = Field(
        default=False,
        strict=True,
        description="Reject parameters without effect instead of listing them.",
    )
    billing: Billing = Field(Billing.POSTPAID, description="How the tenant pays.")
    service_tier: RequestTier = Field(
        ServiceTier.DEFAULT, description="Service tier of requests that specify none."
    )
    shows_cost: bool = Field(
        default=False, strict=True, description="Whether responses include their cost."
    )
    zero_retention: bool = Field(
        default=False,
        strict=True,
        description="Whether nothing of a request is kept after its end, but its usage record.",
    )


class TenantCreation(_TenantOptions):
    """A tenant to create."""

    name: DisplayName
    id: str | None = Field(
        None,
        max_length=63,
        description="1 to 63 characters from a-z, 0-9 and `-`. Default: random.",
    )


class TenantChange(ChangeBody, _TenantOptions):
    """Changes to a tenant; absent fields stay unchanged."""

    name: DisplayName = ""


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
    limits: TenantLimitsShown
    billing: Billing
    service_tier: ServiceTier
    shows_cost: bool
    zero_retention: bool
    cors_origins: list[str]
    stripe_customer_id: str | None
    time_zone: str
    anomaly_factor: int | None
    anomaly_repeats: int | None
    anomaly_action: AnomalyAction
    created_at: datetime


router = operators_router("Tenants", "/tenants")


Tenants = Annotated[TenantService, made(TenantService)]


@router.get("", summary="List all tenants", response_model=ListBody[TenantBody])
async def list_tenants(
    tenants: Tenants,
    *,
    search: Annotated[
        str | None, text_filter("Only tenants whose id or name contains this text.")
    ] = None,
    wanted: WantedPage,
) -> Page[Tenant]:
    """List tenants, oldest first."""
    return await tenants.page(wanted, text=search or "")


@router.post("", summary="Create a tenant", response_model=TenantBody)
async def create_tenant(tenants: Tenants, operator: Operator, body: TenantCreation) -> Tenant:
    """Create a tenant, which is active at once."""
    options = body.options()
    name, tenant_id = options.pop("name"), options.pop("id", None)
    return await tenants.create(name, tenant_id=tenant_id, actor=operator.actor, **options)


@router.get("/{tenant_id}", summary="Get a tenant", response_model=TenantBody)
async def get_tenant(tenants: Tenants, tenant_id: TenantId) -> Tenant:
    """Get a tenant with all its options."""
    return await tenants.get(tenant_id)


@router.patch("/{tenant_id}", summary="Update a tenant", response_model=TenantBody)
async def change_tenant(
    tenants: Tenants, operator: Operator, tenant_id: TenantId, body: TenantChange
) -> Tenant:
    """Change the given fields. All gateways apply the change within a second."""
    return await tenants.update(tenant_id, actor=operator.actor, **body.options())


@router.post("/{tenant_id}:suspend", summary="Suspend a tenant", response_model=TenantBody)
async def suspend_tenant(tenants: Tenants, operator: Operator, tenant_id: TenantId) -> Tenant:
    """Suspend the tenant on all gateways within a second. Running requests continue."""
    return await tenants.suspend(tenant_id, actor=operator.actor)


@router.post(
    "/{tenant_id}:activate", summary="Activate a suspended tenant", response_model=TenantBody
)
async def activate_tenant(tenants: Tenants, operator: Operator, tenant_id: TenantId) -> Tenant:
    """Activate the tenant on all gateways within a second."""
    return await tenants.activate(tenant_id, actor=operator.actor)
