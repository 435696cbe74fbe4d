"""Webhook events of batches: one for each end, in the transaction that ends the batch."""

from sqlalchemy.ext.asyncio import AsyncSession

from gateway.accounts.webhooks.service import EventName, WebhookStore, make_event, webhooks_of
from gateway.records.batches import Batch


async def add_events(transaction: AsyncSession, batch: Batch) -> None:
    """Add an event about an ended batch for each webhook of its tenant."""
    kind, webhooks = f"batch.{batch.status}", await webhooks_of(transaction, batch.tenant_id)
    data: dict[str, object] = {
        "id": batch.id,
        "status": batch.status,
        "output_file_id": batch.output_file_id,
        "error_file_id": batch.error_file_id,
        "request_counts": {
            "total": batch.total,
            "completed": batch.completed,
            "failed": batch.failed,
        },
        "metadata": batch.labels,
    }
    names = [EventName(webhook.id, kind, batch.id, "", 0) for webhook in webhooks]
    await WebhookStore(transaction).add_events(
        [make_event(name, batch.tenant_id, data) for name in names]
    )
