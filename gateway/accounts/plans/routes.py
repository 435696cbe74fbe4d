"""Plans, the default limits for groups of tenants: `/admin/plans`."""

from datetime import datetime
from typing import Annotated, Any, Final, Literal, Self

from fastapi import Path
from pydantic import BaseModel, Field

from gateway.accounts.plans.service import PlanService, ScopedLimits
from gateway.accounts.plans.spending import MOST_OF_PLAN, read_spend_limits
from gateway.accounts.routes_common import ChangeBody, ListBody, Name, RequestBody, limits_schema
from gateway.http.authorization import Operator, operators_router
from gateway.http.services import made
from gateway.platform.database.paging import Page
from gateway.records.limits import LimitScope, read_limits
from gateway.records.records import Plan

_DESCRIPTION: Final = "Limits for holders without their own; null or absent: no limit."
TenantLimits = Annotated[
    dict[str, Any],
    limits_schema(LimitScope.TENANT, additionalProperties=False),
    Field(description=_DESCRIPTION),
]
OtherLimits = Annotated[
    dict[str, Any],
    limits_schema(LimitScope.KEY, additionalProperties=False),
    Field(description=_DESCRIPTION),
]


class _PlanLimits(RequestBody):
    tenant_limits: TenantLimits = Field(default_factory=dict)
    project_limits: OtherLimits = Field(default_factory=dict)
    key_limits: OtherLimits = Field(default_factory=dict)
    spend_limits: dict[str, Any] = Field(
        default_factory=dict,
        max_length=MOST_OF_PLAN,
        description="Micro-dollars of each tenant, by SCOPE/WINDOW or SCOPE/WINDOW/MODEL, such as "
        "`tenant/month` or `user/day`. Null removes one.",
        examples=[{"tenant/month": 2_000_000_000, "user/day": 500_000}],
    )

    def limits(self) -> ScopedLimits:
        """Return the limits by scope. Raises InvalidParameterError."""
        return {
            scope: read_limits(getattr(self, f"{scope}_limits"), scope, param=f"{scope}_limits")
            for scope in LimitScope
        }


class PlanCreation(_PlanLimits):
    """A plan to create."""

    id: str = Field(
        min_length=1, max_length=63, description="1 to 63 characters from a-z, 0-9 and `-`."
    )
    name: Name | None = Field(None, description="Display name. Default: the id.")


class PlanChange(ChangeBody, _PlanLimits):
    """Changes to a plan; absent fields stay unchanged."""

    name: Name | None = Field(None, description="Display name. Null: unchanged.")


class PlanBody(BaseModel):
    """A plan: default limits for every holder without its own."""

    object: Literal["plan"] = "plan"
    id: str
    name: str
    tenant_limits: TenantLimits
    project_limits: OtherLimits
    key_limits: OtherLimits
    spend_limits: dict[str, int]
    created_at: datetime

    @classmethod
    def of(cls, plan: Plan) -> Self:
        """Return the response body of a plan."""
        limits: dict[str, Any] = {f"{scope}_limits": plan.limits[scope] for scope in LimitScope}
        limits["spend_limits"] = dict(plan.spend_limits)
        return cls(id=plan.id, name=plan.name, created_at=plan.created_at, **limits)


router = operators_router("Plans", "/plans")

Plans = Annotated[PlanService, made(PlanService)]

PlanId = Annotated[str, Path(max_length=63, description="Id of the plan.")]


@router.get("", summary="List plans", response_model=ListBody[PlanBody])
async def list_plans(plans: Plans) -> Page[PlanBody]:
    """List plans, oldest first."""
    return Page(list(map(PlanBody.of, await plans.list_all())), has_more=False)


@router.post("", summary="Create a plan")
async def create_plan(plans: Plans, operator: Operator, body: PlanCreation) -> PlanBody:
    """Create a plan. It applies to every tenant whose `plan_id` names it."""
    plan = await plans.create(
        body.id,
        name=body.name,
        limits=body.limits(),
        spend_limits=read_spend_limits(body.spend_limits),
        actor=operator.actor,
    )
    return PlanBody.of(plan)


@router.get("/{plan_id}", summary="Get a plan")
async def get_plan(plans: Plans, plan_id: PlanId) -> PlanBody:
    """Get a plan with its limits for tenants, projects and keys."""
    return PlanBody.of(await plans.get(plan_id))


@router.patch("/{plan_id}", summary="Update a plan")
async def change_plan(
    plans: Plans, operator: Operator, plan_id: PlanId, body: PlanChange
) -> PlanBody:
    """Change only the given limits. Every gateway applies them within a second."""
    changed = await plans.update(
        plan_id,
        name=body.name,
        limits=body.limits(),
        spend_limits=read_spend_limits(body.spend_limits),
        actor=operator.actor,
    )
    return PlanBody.of(changed)
