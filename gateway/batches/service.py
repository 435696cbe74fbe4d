"""Batches of tenants: create, get, list and cancel."""

import re
import secrets
from datetime import timedelta
from typing import Final

from sqlalchemy import func, select

from gateway.batches.files.service import FileService, is_id, read_retention
from gateway.batches.files.store import Owner
from gateway.batches.lines import ENDPOINTS_BY_PATH
from gateway.batches.principals import JWT_PREFIX
from gateway.batches.store import OPEN, BatchStore
from gateway.platform.database.claims import lock_tenant
from gateway.platform.database.engine import Database
from gateway.platform.database.paging import Page, PageRequest, find_record, read_page
from gateway.platform.database.tables import BatchRow
from gateway.platform.settings import Settings
from gateway.records.batches import Batch, BatchStatus, FilePurpose
from gateway.records.errors import (
    InvalidParameterError,
    NotFoundError,
    StateConflictError,
    TenantQueueFullError,
    must,
    shown,
)
from gateway.records.principal import Principal
from gateway.records.times import utc_now

MAX_LABELS: Final = 16
MAX_LABEL_NAME: Final = 64
MAX_LABEL_VALUE: Final = 512
RETRY_AFTER_SECONDS: Final = 10.0
_NOT_STORED: Final = re.compile("[\0\ud800-\udfff]")
_UNITS: Final = {"m": "minutes", "h": "hours", "d": "days"}


class BatchService:
    """Batches of all tenants. All methods raise StoreUnavailableError."""

    def __init__(self, settings: Settings, database: Database) -> None:
        self._database = database
        self._files = FileService(settings, database)
        self._windows = settings.batch_windows
        self._most = settings.max_batches_of_tenant

    async def create(
        self,
        principal: Principal,
        *,
        input_file_id: str,
        endpoint: str,
        completion_window: str,
        labels: dict[str, str] | None,
        output_seconds: int | None,
    ) -> Batch:
        """Create a batch, which is then validated. Raises an ApiError."""
        _check_labels(labels)
        if endpoint not in ENDPOINTS_BY_PATH:
            raise must("endpoint", f"be one of {', '.join(ENDPOINTS_BY_PATH)}", endpoint)
        if completion_window not in self._windows:
            windows = ", ".join(self._windows)
            raise must("completion_window", f"be one of {windows}", completion_window)
        if output_seconds is not None:
            read_retention(output_seconds, param="output_expires_after.seconds")
        owner = Owner(principal.tenant_id, principal.project_id)
        file = await self._files.get(owner, input_file_id, param="input_file_id")
        if file.purpose is not FilePurpose.BATCH:
            rule = f"be a file with the purpose {FilePurpose.BATCH}"
            raise must("input_file_id", rule, file.purpose)
        is_token = principal.credential_id.startswith(JWT_PREFIX)
        models = principal.allowed_models if is_token else None
        now = utc_now()
        batch = Batch(
            id=f"batch_{secrets.token_hex(16)}",
            tenant_id=principal.tenant_id,
            project_id=principal.project_id,
            credential_id=principal.credential_id,
            allowed_models=None if models is None else sorted(models),
            dialect=principal.dialect,
            endpoint=endpoint,
            input_file_id=file.id,
            completion_window=completion_window,
            labels=labels,
            output_seconds=output_seconds,
            created_at=now,
            expires_at=now + window_of(completion_window),
        )
        async with self._database.writing() as transaction:
            await lock_tenant(transaction, batch.tenant_id)
            is_its = BatchRow.tenant_id == batch.tenant_id
            number = select(func.count()).where(is_its, BatchRow.status.in_(OPEN))
            if (known := await transaction.scalar(number) or 0) >= self._most:
                raise TenantQueueFullError(
                    f"An account must have at most {self._most} batches that have not ended. "
                    f"Given: one more than {known}. Retry when a batch has ended.",
                    retry_after_seconds=RETRY_AFTER_SECONDS,
                )
            await BatchStore(transaction).add(batch)
        return batch

    async def get(self, owner: Owner, batch_id: str) -> Batch:
        """Return a batch. Raises NotFoundError."""
        batch = None
        if is_id(batch_id):
            conditions = (*owner.conditions(BatchRow), BatchRow.id == batch_id)
            async with self._database.reading() as transaction:
                batch = await find_record(transaction, BatchRow, *conditions)
        if batch is None:
            raise NotFoundError(f"The batch {shown(batch_id)} does not exist.")
        return batch

    async def page(self, owner: Owner, wanted: PageRequest) -> Page[Batch]:
        """Return a page of batches. Raises InvalidParameterError for an unknown `after`."""
        async with self._database.reading() as transaction:
            return await read_page(transaction, BatchRow, wanted, *owner.conditions(BatchRow))

    async def cancel(self, owner: Owner, batch_id: str) -> Batch:
        """Cancel a batch; lines that have ended stay in its result files.

        A batch that is being cancelled stays as it is. Raises NotFoundError, and
        StateConflictError if the batch has ended.
        """
        await self.get(owner, batch_id)
        async with self._database.writing() as transaction:
            store = BatchStore(transaction)
            batch = await store.lock(batch_id)
            if batch.status in (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS):
                batch = await store.cancel(batch_id, utc_now())
        if batch.status is not BatchStatus.CANCELLING and batch.status is not BatchStatus.CANCELLED:
            raise StateConflictError(
                f"The batch {shown(batch_id)} cannot be cancelled: it is {batch.status}."
            )
        return batch


def window_of(text: str) -> timedelta:
    """Return the length of a completion window, such as `24h`."""
    return timedelta(**{_UNITS[text[-1]]: int(text[:-1])})


def _check_labels(labels: dict[str, str] | None) -> None:
    if labels is None:
        return
    fits = all(
        len(name) <= MAX_LABEL_NAME and len(value) <= MAX_LABEL_VALUE
        for name, value in labels.items()
    )
    if len(labels) > MAX_LABELS or not fits:
        raise must(
            "metadata",
            f"have at most {MAX_LABELS} pairs, with names of at most {MAX_LABEL_NAME} and values "
            f"of at most {MAX_LABEL_VALUE} characters",
            labels,
        )
    for name, value in labels.items():
        # PostgreSQL cannot store it.
        if bad := _NOT_STORED.search(name + value):
            raise InvalidParameterError(
                f"'metadata' must not contain the character U+{ord(bad[0]):04X}. Given: {name!a}.",
                param="metadata",
            )
