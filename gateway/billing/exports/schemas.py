"""Response bodies of exports."""

from datetime import datetime
from typing import Literal

from pydantic import BaseModel, Field

from gateway.accounts.shared import ListBody, RecordBody
from gateway.platform.database.tables import ExportBatchState


class ExportBody(RecordBody):
    """A sink of the ledger, and how far the export is."""

    object: Literal["export"] = "export"
    name: str
    kind: str
    created_at: datetime = Field(description="The sink gets what entered the ledger since then.")
    paused_at: datetime | None
    lag_rows: int = Field(description="Rows that wait; rejected and held ones do not count.")
    oldest_at: datetime | None = Field(description="End of the oldest request that waits.")
    batches: dict[str, int] = Field(description="Number of batches by state.")
    held_micros: int = Field(description="Cost of tenants without a customer in Stripe.")
    failures: int = Field(description="Failed attempts since the last success.")
    next_attempt_at: datetime | None = Field(description="Null unless the last attempt failed.")
    last_error: str


class ExportList(ListBody[ExportBody]):
    """All sinks, by name."""


class ExportBatchBody(RecordBody):
    """Events that the sink has not confirmed: a sum for Stripe, or requests."""

    object: Literal["export.batch"] = "export.batch"
    id: int
    state: ExportBatchState
    rows: int
    identifier: str = Field(description="Id of the event; empty for several events.")
    tenant_id: str | None
    customer: str
    cost_micros: int | None = Field(description="The sum; null for requests.")
    oldest_at: datetime
    attempts: int
    uncertain_since: datetime | None = Field(
        description="Since this attempt the sink may have stored the batch."
    )
    last_error: str


class ExportBatchList(ListBody[ExportBatchBody]):
    """A page of batches, oldest first."""


class ExportRetry(BaseModel):
    """The number of batches that are sent again."""

    object: Literal["export.retry"] = "export.retry"
    batches: int


class DiscardedBatch(BaseModel):
    """A batch that is never sent."""

    object: Literal["export.batch.deleted"] = "export.batch.deleted"
    id: int
    deleted: Literal[True] = True


class RemovedExport(BaseModel):
    """A removed sink."""

    object: Literal["export.deleted"] = "export.deleted"
    name: str
    deleted: Literal[True] = True
