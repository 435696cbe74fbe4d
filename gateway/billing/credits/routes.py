"""Prepaid balances: `/admin/tenants/{tenant_id}/credits`."""

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import AwareDatetime, Field

from gateway.accounts.routes_common import ListBody, RecordBody, RequestBody, TenantId, WantedPage
from gateway.billing.credits.service import MAX_NOTE_CHARACTERS, CreditService
from gateway.http.authorization import Operator, operators_router
from gateway.http.services import made
from gateway.records.errors import InvalidParameterError
from gateway.records.records import MAX_AMOUNT_MICROS, Credit, CreditKind

AmountMicros = Annotated[
    int,
    Field(
        strict=True,
        ge=-MAX_AMOUNT_MICROS,
        le=MAX_AMOUNT_MICROS,
        description="Micro-dollars; only an adjustment may be negative.",
    ),
]


class CreditAddition(RequestBody):
    """A change of a prepaid balance."""

    kind: Literal[CreditKind.GRANT, CreditKind.ADJUSTMENT] = CreditKind.GRANT
    amount_micros: AmountMicros
    note: str = Field(
        "",
        max_length=MAX_NOTE_CHARACTERS,
        description="Purpose; required for an adjustment.",
    )
    expires_at: AwareDatetime | None = Field(
        None, description="When the rest of a grant expires; null: never."
    )


class CreditBody(RecordBody):
    """One change of a prepaid balance."""

    object: Literal["credit"] = "credit"
    id: str
    tenant_id: str
    kind: CreditKind
    amount_micros: int = Field(description="Micro-dollars; negative for a deduction.")
    note: str
    created_at: datetime
    expires_at: datetime | None
    grant_id: str | None = Field(description="The expired grant, for an expiry.")


class BalanceBody(RecordBody):
    """A tenant's balance in the ledger, which records usage a few seconds after a request ends."""

    granted_micros: int = Field(description="Grants and adjustments, minus expired credits.")
    spent_micros: int
    balance_micros: int = Field(
        validation_alias="micros", description="Remaining credits; a negative value is a debt."
    )


class CreditList(ListBody[CreditBody]):
    """A page of balance changes, oldest first."""

    balance: BalanceBody


router = operators_router("Credits", "/tenants/{tenant_id}")

Credits = Annotated[CreditService, made(CreditService)]


@router.get("/credits", summary="Get a tenant's balance and its changes", response_model=CreditList)
async def list_credits(
    credits_: Credits, tenant_id: TenantId, wanted: WantedPage
) -> dict[str, Any]:
    """List credits, oldest first. The list excludes usage; the balance includes it."""
    balance = await credits_.balance(tenant_id)
    page = await credits_.page(tenant_id, wanted)
    return {"entries": page.entries, "has_more": page.has_more, "balance": balance}


@router.post("/credits", summary="Grant or adjust a tenant's credits", response_model=CreditBody)
async def add_credit(
    credits_: Credits, operator: Operator, tenant_id: TenantId, body: CreditAddition
) -> Credit:
    """Add to the balance from which a prepaid tenant pays.

    Do not retry after a success: each call adds again.
    """
    if body.kind is CreditKind.GRANT:
        return await credits_.grant(
            tenant_id,
            body.amount_micros,
            note=body.note,
            expires_at=body.expires_at,
            actor=operator.actor,
        )
    if body.expires_at is not None:
        raise InvalidParameterError(
            "'expires_at' must be null unless 'kind' is 'grant'. "
            f"Given: {body.expires_at.isoformat()}.",
            param="expires_at",
        )
    return await credits_.adjust(
        tenant_id, body.amount_micros, note=body.note, actor=operator.actor
    )
