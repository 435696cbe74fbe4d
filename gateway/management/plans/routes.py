"""Plans, the default limits for groups of tenants: `/admin/plans`."""

from typing import Annotated

from fastapi import APIRouter, Path

from gateway.http.authorization import CanAdminister, CanSeeEverything, Context
from gateway.http.bounded_route import BoundedRoute
from gateway.http.context import ProcessContext
from gateway.management.plans.schemas import PlanBody, PlanChange, PlanCreation, PlanList
from gateway.management.plans.service import PlanService

router = APIRouter(prefix="/plans", tags=["Plans"], route_class=BoundedRoute)

PlanId = Annotated[str, Path(max_length=63, description="Id of the plan.")]


@router.get("", summary="List plans")
async def list_plans(context: Context, _principal: CanSeeEverything) -> PlanList:
    """List plans, oldest first."""
    plans = await _service(context).list_all()
    return PlanList(data=[PlanBody.of(plan) for plan in plans], has_more=False)


@router.post("", summary="Create a plan")
async def create_plan(context: Context, principal: CanAdminister, body: PlanCreation) -> PlanBody:
    """Create a plan. It applies to every tenant whose `plan_id` names it."""
    plan = await _service(context).create(
        body.id, name=body.name, limits=body.limits(), actor=principal.actor
    )
    return PlanBody.of(plan)


@router.get("/{plan_id}", summary="Get a plan")
async def get_plan(context: Context, _principal: CanSeeEverything, plan_id: PlanId) -> PlanBody:
    """Get a plan with its limits for tenants, projects and keys."""
    return PlanBody.of(await _service(context).get(plan_id))


@router.patch("/{plan_id}", summary="Update a plan")
async def change_plan(
    context: Context, principal: CanAdminister, plan_id: PlanId, body: PlanChange
) -> PlanBody:
    """Change only the limits that the body names. Every gateway applies them within a second."""
    changed = await _service(context).update(
        plan_id, name=body.name, limits=body.limits(), actor=principal.actor
    )
    return PlanBody.of(changed)


def _service(context: ProcessContext) -> PlanService:
    return PlanService(context.database, context.announcer)
