"""Request and response bodies of tenants, projects and members."""

from datetime import datetime
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, Field

from contract.dialect import Dialect
from contract.tier import ServiceTier
from gateway.accounts.limits import read_limit_changes
from gateway.accounts.paging import Page
from gateway.accounts.records import (
    Billing,
    Member,
    Project,
    ProjectStatus,
    Role,
    Tenant,
    TenantStatus,
)
from gateway.accounts.tenant_service import MAX_WEIGHT, MIN_WEIGHT
from gateway.api.fields import Given, LimitsGiven, LimitsShown, ListBody, Name

Weight = Annotated[
    float,
    Field(
        ge=MIN_WEIGHT,
        le=MAX_WEIGHT,
        description="Share of the workers relative to other tenants that have work waiting.",
    ),
]
PlanId = Annotated[
    str | None, Field(max_length=63, description="Where limits come from that nobody sets.")
]
DefaultModel = Annotated[Name | None, Field(description="The model of requests that name none.")]
TenantDialect = Annotated[Dialect | None, Field(description="Of requests that name none.")]


class _WithLimits(Given):
    def options(self) -> dict[str, Any]:
        """Return the arguments for the service. Raises InvalidParameterError."""
        options = self.given()
        if "limits" in options:
            options["limits"] = read_limit_changes(options["limits"])
        return options


class TenantCreation(_WithLimits):
    """A tenant to create."""

    name: Name
    id: str | None = Field(
        None,
        max_length=63,
        description="1 to 63 characters out of a-z, 0-9 and `-`; random if absent.",
    )
    weight: Weight = 1.0
    dialect: TenantDialect = None
    strict_parameters: bool = Field(
        default=False, description="Refuse parameters without effect instead of listing them."
    )
    default_model: DefaultModel = None
    plan_id: PlanId = None
    limits: LimitsGiven = Field(default_factory=dict)
    billing: Billing = Billing.POSTPAID
    service_tier: ServiceTier = Field(
        ServiceTier.DEFAULT, description="The tier of requests that name none."
    )
    shows_cost: bool = Field(default=False, description="Whether answers say what they cost.")


class TenantChange(_WithLimits):
    """Changes to a tenant; absent fields stay unchanged."""

    name: Name = Field(default_factory=str)
    weight: Weight = Field(default_factory=float)
    dialect: TenantDialect = None
    strict_parameters: bool = Field(default_factory=bool)
    default_model: DefaultModel = None
    plan_id: PlanId = None
    limits: LimitsGiven = Field(default_factory=dict)
    billing: Billing = Field(default_factory=lambda: Billing.POSTPAID)
    service_tier: ServiceTier = Field(default_factory=lambda: ServiceTier.DEFAULT)
    shows_cost: bool = Field(default_factory=bool)


class TenantBody(BaseModel):
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
    created_at: datetime

    @classmethod
    def of(cls, tenant: Tenant) -> Self:
        """Return the response body of a tenant."""
        return cls(
            id=tenant.id,
            name=tenant.name,
            weight=tenant.weight,
            status=tenant.status,
            dialect=tenant.dialect,
            strict_parameters=tenant.strict_parameters,
            default_model=tenant.default_model,
            plan_id=tenant.plan_id,
            limits={name.value: value for name, value in tenant.limits.items()},
            billing=tenant.billing,
            service_tier=tenant.service_tier,
            shows_cost=tenant.shows_cost,
            created_at=tenant.created_at,
        )


class TenantList(ListBody[TenantBody]):
    """A page of tenants, oldest first."""

    @classmethod
    def of(cls, page: Page[Tenant]) -> Self:
        """Return the response body of a page."""
        return cls(data=[TenantBody.of(each) for each in page.entries], has_more=page.has_more)


class ProjectCreation(_WithLimits):
    """A project to create."""

    name: Name
    limits: LimitsGiven = Field(default_factory=dict)


class ProjectChange(_WithLimits):
    """Changes to a project; absent fields stay unchanged."""

    name: Name = Field(default_factory=str)
    limits: LimitsGiven = Field(default_factory=dict)


class ProjectBody(BaseModel):
    """A project."""

    object: Literal["project"] = "project"
    id: str
    tenant_id: str
    name: str
    status: ProjectStatus
    limits: LimitsShown
    created_at: datetime

    @classmethod
    def of(cls, project: Project) -> Self:
        """Return the response body of a project."""
        return cls(
            id=project.id,
            tenant_id=project.tenant_id,
            name=project.name,
            status=project.status,
            limits={name.value: value for name, value in project.limits.items()},
            created_at=project.created_at,
        )


class ProjectList(ListBody[ProjectBody]):
    """A page of projects, oldest first."""

    @classmethod
    def of(cls, page: Page[Project]) -> Self:
        """Return the response body of a page."""
        return cls(data=[ProjectBody.of(each) for each in page.entries], has_more=page.has_more)


class MemberAddition(Given):
    """A member to add."""

    subject: Name = Field(description="The claim `sub` of the person's tokens.")
    role: Role
    name: Name | None = Field(None, description="The subject if absent.")


class MemberChange(Given):
    """Changes to a member."""

    role: Role


class MemberBody(BaseModel):
    """A member."""

    object: Literal["member"] = "member"
    id: str
    tenant_id: str
    subject: str
    name: str
    role: Role
    created_at: datetime

    @classmethod
    def of(cls, member: Member) -> Self:
        """Return the response body of a member."""
        return cls(
            id=member.id,
            tenant_id=member.tenant_id,
            subject=member.subject,
            name=member.name,
            role=member.role,
            created_at=member.created_at,
        )


class MemberList(ListBody[MemberBody]):
    """A page of members, oldest first."""

    @classmethod
    def of(cls, page: Page[Member]) -> Self:
        """Return the response body of a page."""
        return cls(data=[MemberBody.of(each) for each in page.entries], has_more=page.has_more)


class RemovedMember(BaseModel):
    """A removed member."""

    object: Literal["member.deleted"] = "member.deleted"
    id: str
    deleted: Literal[True] = True
