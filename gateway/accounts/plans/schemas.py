"""Request and response bodies of plans."""

from datetime import datetime
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BaseModel, Field, WithJsonSchema

from gateway.accounts.plans.service import ScopedLimits
from gateway.accounts.shared.fields import ListBody, Name, RequestBody
from gateway.records.limits import MAX_LIMIT, LimitName, LimitScope, read_limits
from gateway.records.records import Plan

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
    Field(description="Limits for holders without their own; null or absent: no limit."),
]


class _PlanLimits(RequestBody):
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
        min_length=1, max_length=63, description="1 to 63 characters from a-z, 0-9 and `-`."
    )
    name: Name | None = Field(None, description="Display name. Default: the id.")


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
        limits: dict[str, Any] = {f"{scope}_limits": plan.limits[scope] for scope in LimitScope}
        return cls(id=plan.id, name=plan.name, created_at=plan.created_at, **limits)


class PlanList(ListBody[PlanBody]):
    """All plans, oldest first."""
