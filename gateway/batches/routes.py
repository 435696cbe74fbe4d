"""Batches, as OpenAI's API has them: `/v1/batches`.

Operators list and cancel those of a tenant at `/admin/tenants/{tenant_id}/batches`.
"""

import secrets
from dataclasses import asdict, replace
from datetime import timedelta
from typing import Annotated, Any, Final, Literal, Self

from fastapi import Path, Request
from pydantic import BaseModel, Field
from sqlalchemy import ColumnElement, func, select
from sqlalchemy.ext.asyncio import AsyncSession

from gateway.accounts.routes_common import PageSize, RequestBody, TenantRouter
from gateway.batches.files.routes import (
    After,
    CallerPrincipal,
    CursorList,
    OwnerOfFiles,
    Seconds,
    SecondsOrNull,
    caller_principal,
)
from gateway.batches.files.service import FileService, Owner, is_id, read_retention
from gateway.batches.lines import ENDPOINTS_BY_PATH
from gateway.batches.store import OPEN, BatchStore
from gateway.dialects.profile_choice import DIALECT_HEADER, choose_profile
from gateway.http.services import made, provided
from gateway.platform.database.claims import lock_tenant
from gateway.platform.database.engine import Database
from gateway.platform.database.paging import Page, PageRequest, find_record, read_page
from gateway.platform.database.tables import BatchRow
from gateway.platform.settings import Settings
from gateway.records.batches import Batch, BatchStatus, FilePurpose
from gateway.records.checks import is_storable
from gateway.records.errors import (
    NotFoundError,
    PermissionDeniedError,
    StateConflictError,
    TenantQueueFullError,
    must,
    shown,
)
from gateway.records.limits import JWT_PREFIX
from gateway.records.principal import Principal
from gateway.records.times import utc_now
from gateway.records.usage_record import MICRO

MAX_LABELS: Final = 16
MAX_LABEL_NAME: Final = 64
MAX_LABEL_VALUE: Final = 512
RETRY_AFTER_SECONDS: Final = 10.0
_LINES: Final = str.maketrans("", "", "\t\n\r")
"""What a value may have, for it may be a text of several lines."""
_UNITS: Final = {"m": "minutes", "h": "hours", "d": "days"}


class BatchService:
    """Batches of all tenants. All methods raise StoreUnavailableError."""

    def __init__(self, settings: Settings, database: Database) -> None:
        self._database = database
        self._files = FileService(settings, database)
        self.windows = settings.batch_windows
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
        if completion_window not in self.windows:
            windows = ", ".join(self.windows)
            raise must("completion_window", f"be one of {windows}", completion_window)
        if output_seconds is not None:
            read_retention(output_seconds, param="output_expires_after.seconds")
        owner = Owner(principal.tenant_id, principal.project_id)
        file = await self._files.get(owner, input_file_id, param="input_file_id")
        if file.purpose is not FilePurpose.BATCH:
            rule = f"be a file with the purpose {FilePurpose.BATCH}"
            raise must("input_file_id", rule, file.purpose)
        batch = new_batch(
            "batch_",
            principal,
            endpoint=endpoint,
            input_file_id=file.id,
            completion_window=completion_window,
            labels=labels,
            output_seconds=output_seconds,
        )
        async with self._database.writing() as transaction:
            await self.add(batch, transaction)
        return batch

    async def add(self, batch: Batch, transaction: AsyncSession) -> None:
        """Insert a new batch. Raises TenantQueueFullError if its tenant has too many."""
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

    async def get(self, owner: Owner, batch_id: str) -> Batch:
        """Return a batch. Raises NotFoundError."""
        batch = None
        if is_id(batch_id):
            conditions = (*self._visible(owner), BatchRow.id == batch_id)
            async with self._database.reading() as transaction:
                batch = await find_record(transaction, BatchRow, *conditions)
        if batch is None:
            raise NotFoundError(f"The batch {shown(batch_id)} does not exist.")
        return batch

    async def page(self, owner: Owner, wanted: PageRequest) -> Page[Batch]:
        """Return a page of batches. Raises InvalidParameterError for an unknown `after`."""
        async with self._database.reading() as transaction:
            return await read_page(transaction, BatchRow, wanted, *self._visible(owner))

    def _visible(self, owner: Owner) -> list[ColumnElement[bool]]:
        """Return the conditions for the batches that an owner may use here."""
        return owner.conditions(BatchRow)

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


def new_batch(prefix: str, principal: Principal, **values: Any) -> Batch:
    """Return a batch of a principal whose id begins with a prefix, with further `values`.

    Raises PermissionDeniedError if nothing of the tenant's requests may be kept.
    """
    if principal.zero_retention:
        raise PermissionDeniedError(
            "Batches keep requests and their results, which the account's 'zero_retention' does "
            "not allow."
        )
    is_token = principal.credential_id.startswith(JWT_PREFIX)
    models = principal.allowed_models if is_token else None
    now = utc_now()
    return Batch(
        id=f"{prefix}{secrets.token_hex(16)}",
        tenant_id=principal.tenant_id,
        project_id=principal.project_id,
        credential_id=principal.credential_id,
        allowed_models=None if models is None else sorted(models),
        dialect=principal.dialect,
        created_at=now,
        expires_at=now + window_of(values["completion_window"]),
        **values,
    )


def in_header_dialect(request: Request, principal: Principal, settings: Settings) -> Principal:
    """Return a principal with the dialect that the header of a request names, if it names one."""
    header = request.headers.get(DIALECT_HEADER)
    if header is None:
        return principal
    profile = choose_profile(header, principal, model_dialect="", settings=settings)
    return replace(principal, dialect=profile.name)


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
        if not is_storable(name + value.translate(_LINES)):
            raise must("metadata", "not contain control characters", {name: value})


class OutputExpiry(RequestBody):
    """When the result files expire."""

    anchor: Literal["created_at"]
    seconds: int = Field(strict=True)


class BatchCreation(RequestBody):
    """A batch to create."""

    input_file_id: str = Field(min_length=1, max_length=63, description="Id of an uploaded file.")
    endpoint: str = Field(
        max_length=63, description="`/v1/completions` or `/v1/chat/completions`, for all lines."
    )
    completion_window: str = Field(
        max_length=16, description="Time until the batch expires; `24h`, or one of the operator's."
    )
    metadata: dict[str, str] | None = Field(None, description="Up to 16 pairs of text.")
    output_expires_after: OutputExpiry | None = Field(
        None, description="When the result files expire, from the end of the batch."
    )


class BatchError(BaseModel):
    """An error of an input file, or the reason why a batch was stopped."""

    code: str
    message: str
    param: str | None
    line: int | None = Field(description="Line of the input file, counted from 1.")


class BatchErrors(BaseModel):
    """The errors of a batch."""

    object: Literal["list"] = "list"
    data: list[BatchError]


class RequestCounts(BaseModel):
    """Lines of a batch."""

    total: int
    completed: int
    failed: int


class BatchUsage(BaseModel):
    """Tokens of the completed lines."""

    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int
    cost: float = Field(description="What the completed lines cost, in dollars.")


class BatchBody(BaseModel):
    """A batch. Times are Unix seconds."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    model: str | None = Field(description="The model of all lines; null if there are several.")
    errors: BatchErrors | None
    input_file_id: str
    completion_window: str
    status: BatchStatus
    output_file_id: str | None = Field(description="Can be read while the batch runs.")
    error_file_id: str | None = Field(description="Can be read while the batch runs.")
    created_at: Seconds
    in_progress_at: SecondsOrNull
    expires_at: SecondsOrNull
    finalizing_at: SecondsOrNull
    completed_at: SecondsOrNull
    failed_at: SecondsOrNull
    expired_at: SecondsOrNull
    cancelling_at: SecondsOrNull
    cancelled_at: SecondsOrNull
    estimated_completion_at: SecondsOrNull = Field(
        description="By the rate of its lines so far; null before any line ended, and at the end."
    )
    request_counts: RequestCounts
    usage: BatchUsage
    metadata: dict[str, str] | None

    @classmethod
    def of(cls, batch: Batch) -> Self:
        """Return the response body of a batch."""
        end = batch.projected_end(utc_now())
        computed = {
            "model": batch.models[0] or None if len(batch.models) == 1 else None,
            "errors": None if batch.errors is None else {"data": batch.errors},
            # Unfinished lines end at the deadline.
            "estimated_completion_at": None if end is None else min(end, batch.expires_at),
            "usage": {
                "input_tokens": batch.prompt_tokens,
                "input_tokens_details": {"cached_tokens": batch.cached_tokens},
                "output_tokens": batch.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": batch.reasoning_tokens},
                "total_tokens": batch.prompt_tokens + batch.completion_tokens,
                "cost": batch.cost_micros / MICRO,
            },
            "metadata": batch.labels,
        }
        found = asdict(batch)
        return cls.model_validate({**found, "request_counts": found, **computed})


router = TenantRouter("/batches", "Batches", caller_principal)


Batches = Annotated[BatchService, made(BatchService)]
BatchId = Annotated[str, Path(description="Id of the batch.")]


@router.of_customers.post("", summary="Create a batch")
async def create_batch(
    request: Request,
    settings: Annotated[Settings, provided(Settings)],
    batches: Batches,
    principal: CallerPrincipal,
    body: BatchCreation,
) -> BatchBody:
    """Run the requests of an uploaded file, at the price of the tier batch.

    All lines have the dialect of this request: that of its header, else that of the credential. All
    routes under `/v1/batches` need the scope `completions`. A project credential sees only the
    batches of its project.
    """
    expiry = body.output_expires_after
    batch = await batches.create(
        in_header_dialect(request, principal, settings),
        input_file_id=body.input_file_id,
        endpoint=body.endpoint,
        completion_window=body.completion_window,
        labels=body.metadata,
        output_seconds=None if expiry is None else expiry.seconds,
    )
    return BatchBody.of(batch)


@router.get("", summary="List batches")
async def list_batches(
    batches: Batches,
    owner: OwnerOfFiles,
    after: After = None,
    limit: PageSize = 20,
) -> CursorList[BatchBody]:
    """List batches, newest first."""
    page = await batches.page(owner, PageRequest(after, limit, is_newest_first=True))
    return CursorList[BatchBody].of(page, BatchBody.of)


@router.get("/{batch_id}", summary="Get a batch")
async def get_batch(batches: Batches, owner: OwnerOfFiles, batch_id: BatchId) -> BatchBody:
    """Get a batch with its progress."""
    return BatchBody.of(await batches.get(owner, batch_id))


@router.post("/{batch_id}/cancel", summary="Cancel a batch")
async def cancel_batch(batches: Batches, owner: OwnerOfFiles, batch_id: BatchId) -> BatchBody:
    """Cancel a batch. Lines that have not ended are not charged; the others stay readable."""
    return BatchBody.of(await batches.cancel(owner, batch_id))
