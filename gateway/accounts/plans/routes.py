"""Plans, the default limits for groups of tenants: `/admin/plans`."""

from typing import Annotated

from fastapi import APIRouter, Path

from gateway.accounts.plans.schemas import PlanBody, PlanChange, PlanCreation, PlanList
from gateway.accounts.plans.service import PlanService
from gateway.http.authorization import CanAdminister, CanSeeEverything
from gateway.http.bounded_route import BoundedRoute
from gateway.http.services import made

router = APIRouter(prefix="/plans", tags=["Plans"], route_class=BoundedRoute)

Plans = Annotated[PlanService, made(PlanService)]

PlanId = Annotated[str, Path(max_length=63, description="Id of the plan.")]


@router.get("", summary="List plans")
async def list_plans(plans: Plans, _principal: CanSeeEverything) -> PlanList:
    """List plans, oldest first."""
    return PlanList(data=[PlanBody.of(plan) for plan in await plans.list_all()], has_more=False)


@router.post("", summary="Create a plan")
async def create_plan(plans: Plans, principal: CanAdminister, body: PlanCreation) -> PlanBody:
    """Create a plan. It applies to every tenant whose `plan_id` names it."""
    plan = await plans.create(body.id, name=body.name, limits=body.limits(), actor=principal.actor)
    return PlanBody.of(plan)


@router.get("/{plan_id}", summary="Get a plan")
async def get_plan(plans: Plans, _principal: CanSeeEverything, plan_id: PlanId) -> PlanBody:
    """Get a plan with its limits for tenants, projects and keys."""
    return PlanBody.of(await plans.get(plan_id))


@router.patch("/{plan_id}", summary="Update a plan")
async def change_plan(
    plans: Plans, principal: CanAdminister, plan_id: PlanId, body: PlanChange
) -> PlanBody:
    """Change only the limits that the body names. Every gateway applies them within a second."""
    changed = await plans.update(
        plan_id, name=body.name, limits=body.limits(), actor=principal.actor
    )
    return PlanBody.of(changed)
