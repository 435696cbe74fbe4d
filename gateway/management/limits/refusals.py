"""Rejected requests by tenant and reason: `GET /admin/refusals`."""

from typing import Annotated, Literal

from fastapi import APIRouter, Query
from pydantic import BaseModel, Field

from gateway.http.authorization import CanSeeEverything, Context
from gateway.http.bounded_route import BoundedRoute
from gateway.http.context import ProcessContext
from gateway.management.shared.parameters import text_filter
from gateway.quota.period_counts import Period

MOST_ROWS = 1000

router = APIRouter(tags=["Limits"], route_class=BoundedRoute)

Since = Literal["24h", "7d"]
PERIODS: dict[str, Period] = {"24h": Period.HOUR, "7d": Period.DAY}


class RefusalCount(BaseModel):
    """How many requests of a tenant were rejected with one error code."""

    tenant: str | None = Field(description="Null for requests without a valid credential.")
    code: str = Field(description="Code of the error.")
    requests: int


class RefusalCounts(BaseModel):
    """Rejected requests, the largest numbers first."""

    object: Literal["list"] = "list"
    data: list[RefusalCount]
    is_complete: bool = Field(
        description="False if small numbers are missing: of each hour or day, the 1,000 largest "
        "are summed, and the 1,000 largest sums are listed."
    )


@router.get("/refusals", summary="Count rejected requests")
async def count_refusals(
    context: Context,
    _principal: CanSeeEverything,
    since: Annotated[
        Since, Query(description="The current hour and the 23 before, or day and 6 before; UTC.")
    ] = "24h",
    tenant: Annotated[str | None, text_filter("Only this tenant.")] = None,
) -> RefusalCounts:
    """Count the requests that all gateways rejected before any work, by tenant and error code.

    They appear within a second.
    """
    return await refusal_counts(context, since, tenant)


async def refusal_counts(
    context: ProcessContext, since: Since, tenant: str | None
) -> RefusalCounts:
    """Return the numbers. Raises RedisError."""
    found = await context.counts.refusals(PERIODS[since], tenant_id=tenant)
    rows = found.counts.most_common(MOST_ROWS)
    return RefusalCounts(
        data=[
            RefusalCount(
                tenant=tenant or (names[0] if len(names) > 1 and names[0] else None),
                code=names[-1],
                requests=count,
            )
            for names, count in rows
        ],
        is_complete=found.is_complete and len(found.counts) <= MOST_ROWS,
    )
