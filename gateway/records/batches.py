"""Records of files and batches, as passed between packages."""

from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any, Final

from contract.dialect import Dialect
from gateway.records.times import MAX_MS, to_ms, to_time


class FilePurpose(StrEnum):
    """What a file is for."""

    BATCH = "batch"  # Requests of a batch, uploaded by a customer.
    BATCH_OUTPUT = "batch_output"  # Results or errors of a batch.


@dataclass(frozen=True, slots=True, kw_only=True)
class File:
    """A file of a tenant."""

    id: str
    tenant_id: str
    project_id: str | None
    name: str
    purpose: FilePurpose
    size: int
    """Bytes so far: a result file grows while its batch runs."""
    lines: int
    created_at: datetime
    expires_at: datetime | None


class BatchStatus(StrEnum):
    """State of a batch; the values are those of OpenAI's API."""

    VALIDATING = "validating"
    FAILED = "failed"  # The input file is invalid; nothing ran.
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"  # All lines have ended; the result files are being completed.
    COMPLETED = "completed"
    EXPIRED = "expired"  # The deadline passed before every line had ended.
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"

    @property
    def is_end(self) -> bool:
        """Whether the batch does not change any more."""
        return self in ENDED


ENDED: Final = (
    BatchStatus.FAILED,
    BatchStatus.COMPLETED,
    BatchStatus.EXPIRED,
    BatchStatus.CANCELLED,
)


MESSAGE_BATCH: Final = "msgbatch_"
"""Prefix of the ids of batches that were created in Anthropic's form."""


class ChunkState(StrEnum):
    """State of some lines of a batch."""

    WAITING = "waiting"  # To be released by the feeder.
    RELEASED = "released"  # Any gateway may run them; one may be doing so.
    DONE = "done"  # Their results are in the result files.


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A file of requests that run until a deadline."""

    id: str
    tenant_id: str
    project_id: str | None
    credential_id: str
    """Id of the key that created it, or `jwt:` and the token's subject."""
    allowed_models: list[str] | None
    """Models of the token that created the batch; None means all, or those of a key."""
    dialect: Dialect | None
    endpoint: str
    """Path of the endpoint of all lines."""
    input_file_id: str
    output_file_id: str | None = None
    error_file_id: str | None = None
    completion_window: str
    labels: dict[str, str] | None
    """The customer's `metadata`."""
    output_seconds: int | None
    status: BatchStatus = BatchStatus.VALIDATING
    created_at: datetime
    expires_at: datetime
    """The deadline."""
    in_progress_at: datetime | None = None
    finalizing_at: datetime | None = None
    completed_at: datetime | None = None
    failed_at: datetime | None = None
    expired_at: datetime | None = None
    cancelling_at: datetime | None = None
    cancelled_at: datetime | None = None
    errors: list[dict[str, Any]] | None = None
    """Why it failed or was stopped: code, message, param and line."""
    models: list[str] = field(default_factory=list)
    """Names of the models in its lines; an empty name for lines without one."""
    total: int = 0
    """Lines; 0 until the input file is validated, unless the batch is one of messages."""
    completed: int = 0
    failed: int = 0
    unfinished: int = 0
    """Failed lines that did not end before the batch was cancelled or expired."""
    progressed_at: datetime | None = None
    """When its latest line ended, or else when its lines began to run."""
    tokens: int = 0
    """The most tokens that all lines may take, by an estimate."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    cost_micros: int = 0
    """What its completed lines cost, as in the ledger."""
    attempts: int = 0
    """Claims of background jobs since the last one that ended without an error."""

    @property
    def is_of_messages(self) -> bool:
        """Whether it was created in Anthropic's form: a line that cannot run fails alone."""
        return self.id.startswith(MESSAGE_BATCH)

    def projected_end(self, now: datetime) -> datetime | None:
        """Return when its last line ends if lines continue to end at their mean rate.

        It is at most MAX_MS. Return None if the batch does not run, or no line has ended.
        """
        ended = self.completed + self.failed
        if self.status is not BatchStatus.IN_PROGRESS or self.in_progress_at is None or not ended:
            return None
        seconds = (now - self.in_progress_at).total_seconds() * self.total / ended
        return to_time(min(to_ms(self.in_progress_at) + int(1000 * seconds), MAX_MS))


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Some consecutive lines of a batch."""

    batch_id: str
    number: int
    first_line: int
    """Counted from 1."""
    lines: int
    start: int
    """Bytes of the input file before it."""
    size: int
