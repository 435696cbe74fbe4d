"""Running batches, made up."""

from datetime import datetime
from typing import Any

from gateway.records.batches import Batch, BatchStatus


def running_batch(
    tenant: str, name: str, *, created_at: datetime, expires_at: datetime, **values: Any
) -> Batch:
    """Return a batch of completions in progress."""
    return Batch(
        id=name,
        tenant_id=tenant,
        project_id=None,
        credential_id="key",
        allowed_models=None,
        dialect=None,
        endpoint="/v1/completions",
        input_file_id="file",
        completion_window="24h",
        labels=None,
        output_seconds=None,
        created_at=created_at,
        expires_at=expires_at,
        status=BatchStatus.IN_PROGRESS,
        **values,
    )
