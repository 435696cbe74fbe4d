"""Request and response bodies of batches, in the form of OpenAI's API."""

from datetime import datetime
from typing import Any, Literal, Self

from pydantic import BaseModel, Field

from gateway.accounts.shared import RequestBody
from gateway.batches.files.schemas import CursorList, to_seconds
from gateway.records.batches import Batch, BatchStatus
from gateway.records.times import utc_now


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
    created_at: int
    in_progress_at: int | None
    expires_at: int | None
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    estimated_completion_at: int | None = Field(
        description="By the rate of its lines so far; null before any line ended, and at the end."
    )
    request_counts: RequestCounts
    usage: BatchUsage
    metadata: dict[str, str] | None

    @classmethod
    def of(cls, batch: Batch) -> Self:
        """Return the response body of a batch."""
        times = {
            name: to_seconds(time)
            for name in cls.model_fields
            if isinstance(time := getattr(batch, name, None), datetime)
        }
        absent = dict.fromkeys(name for name in cls.model_fields if name.endswith("_at"))
        fields: dict[str, Any] = {**absent, **times}
        if (end := batch.projected_end(utc_now())) is not None:
            # Unfinished lines end at the deadline.
            fields["estimated_completion_at"] = to_seconds(min(end, batch.expires_at))
        return cls(
            id=batch.id,
            endpoint=batch.endpoint,
            model=batch.models[0] or None if len(batch.models) == 1 else None,
            errors=None
            if batch.errors is None
            else BatchErrors(data=[BatchError(**error) for error in batch.errors]),
            input_file_id=batch.input_file_id,
            completion_window=batch.completion_window,
            status=batch.status,
            output_file_id=batch.output_file_id,
            error_file_id=batch.error_file_id,
            request_counts=RequestCounts(
                total=batch.total, completed=batch.completed, failed=batch.failed
            ),
            usage=_usage(batch),
            metadata=batch.labels,
            **fields,
        )


class BatchList(CursorList[BatchBody]):
    """A page of batches, newest first."""


def _usage(batch: Batch) -> BatchUsage:
    return BatchUsage(
        input_tokens=batch.prompt_tokens,
        input_tokens_details={"cached_tokens": batch.cached_tokens},
        output_tokens=batch.completion_tokens,
        output_tokens_details={"reasoning_tokens": batch.reasoning_tokens},
        total_tokens=batch.prompt_tokens + batch.completion_tokens,
    )
