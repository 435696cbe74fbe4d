"""Request and response bodies of credits."""

from datetime import datetime
from typing import Annotated, Literal, Self

from pydantic import AwareDatetime, Field

from gateway.accounts.shared import ListBody, RecordBody, RequestBody
from gateway.billing.credits.checks import MAX_AMOUNT_MICROS, MAX_NOTE_CHARACTERS
from gateway.billing.credits.service import Balance
from gateway.platform.database.paging import Page
from gateway.records.records import Credit, CreditKind

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

    @classmethod
    def with_balance(cls, page: Page[Credit], balance: Balance) -> Self:
        """Return the response body of a page."""
        return cls(
            data=[CreditBody.of(each) for each in page.entries],
            has_more=page.has_more,
            balance=BalanceBody.of(balance),
        )
