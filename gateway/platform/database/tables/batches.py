"""Tables of batches and files: their progress, and what the objects in the file store belong to."""

from datetime import datetime
from typing import Any

from sqlalchemy import JSON, Float, ForeignKey, Index, String
from sqlalchemy.orm import Mapped, mapped_column

from contract.dialect import Dialect
from gateway.platform.database.tables.base import Recorded, Table, TenantId
from gateway.records.batches import Batch, BatchStatus, Chunk, ChunkState, File, FilePurpose


class BatchRow(Recorded[Batch], Table):
    """A file of requests that run until a deadline."""

    __tablename__ = "batches"
    __table_args__ = (
        Index("ix_batches_tenant_id", "tenant_id", "created_at", "id"),
        Index("ix_batches_status", "status", "expires_at"),
    )

    id: Mapped[str] = mapped_column(String(63), primary_key=True)
    tenant_id: Mapped[TenantId]
    project_id: Mapped[str | None] = mapped_column(String(32))
    credential_id: Mapped[str]
    allowed_models: Mapped[list[str] | None] = mapped_column(JSON(none_as_null=True))
    """Models of the token that created the batch; those of a key are read when a line runs."""
    dialect: Mapped[Dialect | None]
    """Dialect that the request named for all lines, or that of its token."""
    endpoint: Mapped[str] = mapped_column(String(63))
    input_file_id: Mapped[str] = mapped_column(String(63), index=True)
    output_file_id: Mapped[str | None] = mapped_column(String(63))
    error_file_id: Mapped[str | None] = mapped_column(String(63))
    completion_window: Mapped[str] = mapped_column(String(16))
    # `metadata` is an attribute of every table class.
    labels: Mapped[dict[str, str] | None] = mapped_column("metadata", JSON(none_as_null=True))
    output_seconds: Mapped[int | None]
    """Seconds from the creation of a result file to its expiry; null: the deployment's."""
    status: Mapped[BatchStatus]
    created_at: Mapped[datetime]
    expires_at: Mapped[datetime]
    in_progress_at: Mapped[datetime | None]
    finalizing_at: Mapped[datetime | None]
    completed_at: Mapped[datetime | None]
    failed_at: Mapped[datetime | None]
    expired_at: Mapped[datetime | None]
    cancelling_at: Mapped[datetime | None]
    cancelled_at: Mapped[datetime | None]
    errors: Mapped[list[dict[str, Any]] | None] = mapped_column(JSON(none_as_null=True))
    models: Mapped[list[str]]
    """Names of the models in its lines; an empty name for lines without one."""
    total: Mapped[int]
    completed: Mapped[int]
    failed: Mapped[int]
    unfinished: Mapped[int] = mapped_column(server_default="0")
    """Failed lines that did not end before the batch was cancelled or expired."""
    progressed_at: Mapped[datetime | None]
    tokens: Mapped[int]
    """The most tokens that all lines may take, by an estimate."""
    prompt_tokens: Mapped[int]
    cached_tokens: Mapped[int]
    completion_tokens: Mapped[int]
    reasoning_tokens: Mapped[int]
    cost_micros: Mapped[int] = mapped_column(server_default="0")
    claimed_until: Mapped[datetime]
    """Until when one process validates or ends the batch."""
    due_at: Mapped[datetime] = mapped_column(server_default="1970-01-01 00:00:00")
    """When a process next looks at it."""
    resting_until: Mapped[datetime] = mapped_column(server_default="1970-01-01 00:00:00")
    """Until when none of its lines is released, because some had to wait for long."""
    attempts: Mapped[int] = mapped_column(server_default="0")
    """Claims since the last one that ended without an error."""


class BatchChunkRow(Recorded[Chunk], Table):
    """Some consecutive lines of a batch, which one gateway runs and whose results are one part."""

    __tablename__ = "batch_chunks"
    __table_args__ = (
        Index("ix_batch_chunks_state", "state", "leased_until"),
        Index("ix_batch_chunks_batch_id", "batch_id", "state", "number"),
    )

    batch_id: Mapped[str] = mapped_column(
        ForeignKey("batches.id", ondelete="CASCADE"), primary_key=True
    )
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    first_line: Mapped[int]
    """Counted from 1."""
    lines: Mapped[int]
    start: Mapped[int]
    """Bytes of the input file before it."""
    size: Mapped[int]
    state: Mapped[ChunkState]
    gateway: Mapped[str] = mapped_column(String(63))
    """The gateway that runs it; empty if none does."""
    leased_until: Mapped[datetime]
    """When it may be claimed, or claimed again."""


class BatchFeedRow(Table):
    """How many lines of a tenant's batches should wait in the queue."""

    __tablename__ = "batch_feeds"

    tenant_id: Mapped[str] = mapped_column(String(63), primary_key=True)
    target: Mapped[int]
    """Lines that should wait in the queue."""
    rate: Mapped[float] = mapped_column(Float)
    """Measured lines a second."""
    done: Mapped[int]
    """Ended lines of the tenant's running batches when the rate was measured."""
    measured_at: Mapped[datetime]
    pushed_back_at: Mapped[datetime]
    """When a gateway last had to wait with a line because of a full queue or a limit."""


class FileRow(Recorded[File], Table):
    """A file of a tenant, which may still grow."""

    __tablename__ = "files"
    __table_args__ = (
        Index("ix_files_tenant_id", "tenant_id", "created_at", "id"),
        Index("ix_files_expires_at", "expires_at"),
    )

    id: Mapped[str] = mapped_column(String(63), primary_key=True)
    tenant_id: Mapped[TenantId]
    project_id: Mapped[str | None] = mapped_column(String(32))
    name: Mapped[str] = mapped_column(String(255))
    purpose: Mapped[FilePurpose]
    size: Mapped[int]
    """Bytes of all parts."""
    lines: Mapped[int]
    parts: Mapped[int]
    """Parts so far, which is the number of the next one."""
    created_at: Mapped[datetime]
    expires_at: Mapped[datetime | None]
    is_visible: Mapped[bool]
    """False during an upload, and after the deletion until the objects are removed."""


class FilePartRow(Table):
    """One object in the file store: a contiguous part of a file."""

    __tablename__ = "file_parts"

    file_id: Mapped[str] = mapped_column(
        ForeignKey("files.id", ondelete="CASCADE"), primary_key=True
    )
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    key: Mapped[str] = mapped_column(String(200))
    start: Mapped[int]
    """Bytes of the file before it."""
    size: Mapped[int]
