"""Prepaid balances: `/admin/tenants/{tenant_id}/credits`."""

from typing import Annotated

from fastapi import APIRouter

from gateway.accounts.shared import AfterId, PageSize, TenantId
from gateway.billing.credits.schemas import CreditAddition, CreditBody, CreditList
from gateway.billing.credits.service import CreditService
from gateway.http.authorization import CanAdminister, CanSeeEverything
from gateway.http.bounded_route import BoundedRoute
from gateway.http.services import made
from gateway.platform.database.paging import PageRequest
from gateway.records.errors import InvalidParameterError
from gateway.records.records import CreditKind

router = APIRouter(prefix="/tenants/{tenant_id}", tags=["Credits"], route_class=BoundedRoute)

Credits = Annotated[CreditService, made(CreditService)]


@router.get("/credits", summary="Get a tenant's balance and its changes")
async def list_credits(
    credits_: Credits,
    _principal: CanSeeEverything,
    tenant_id: TenantId,
    after: AfterId = None,
    limit: PageSize = 20,
) -> CreditList:
    """List credits, oldest first. The list excludes usage; the balance includes it."""
    balance = await credits_.balance(tenant_id)
    page = await credits_.page(tenant_id, PageRequest(after=after, limit=limit))
    return CreditList.with_balance(page, balance)


@router.post("/credits", summary="Grant or adjust a tenant's credits")
async def add_credit(
    credits_: Credits, principal: CanAdminister, tenant_id: TenantId, body: CreditAddition
) -> CreditBody:
    """Add to the balance from which a prepaid tenant pays.

    Do not retry after a success: each call adds again.
    """
    if body.kind is CreditKind.GRANT:
        credit = await credits_.grant(
            tenant_id,
            body.amount_micros,
            note=body.note,
            expires_at=body.expires_at,
            actor=principal.actor,
        )
        return CreditBody.of(credit)
    if body.expires_at is not None:
        raise InvalidParameterError(
            "'expires_at' must be null unless 'kind' is 'grant'. "
            f"Given: {body.expires_at.isoformat()}.",
            param="expires_at",
        )
    credit = await credits_.adjust(
        tenant_id, body.amount_micros, note=body.note, actor=principal.actor
    )
    return CreditBody.of(credit)
