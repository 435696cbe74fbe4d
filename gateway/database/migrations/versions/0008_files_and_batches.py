"""Files and batches."""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

TIMES = (
    "in_progress",
    "progressed",
    "finalizing",
    "completed",
    "failed",
    "expired",
    "cancelling",
    "cancelled",
)
COUNTS = (
    "total",
    "completed",
    "failed",
    "tokens",
    "prompt_tokens",
    "cached_tokens",
    "completion_tokens",
    "reasoning_tokens",
)


def upgrade() -> None:
    _create_files()
    _create_batches()
    op.create_table(
        "batch_chunks",
        sa.Column("batch_id", sa.String(63), nullable=False),
        sa.Column("number", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("first_line", sa.BigInteger(), nullable=False),
        sa.Column("lines", sa.BigInteger(), nullable=False),
        sa.Column("start", sa.BigInteger(), nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column("state", sa.String(32), nullable=False),
        sa.Column("gateway", sa.String(63), nullable=False),
        sa.Column("leased_until", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(
            ["batch_id"],
            ["batches.id"],
            name=op.f("fk_batch_chunks_batch_id_batches"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("batch_id", "number", name=op.f("pk_batch_chunks")),
    )
    op.create_index("ix_batch_chunks_state", "batch_chunks", ["state", "leased_until"])
    op.create_table(
        "batch_feeds",
        sa.Column("tenant_id", sa.String(63), nullable=False),
        sa.Column("target", sa.BigInteger(), nullable=False),
        sa.Column("rate", sa.Float(), nullable=False),
        sa.Column("done", sa.BigInteger(), nullable=False),
        sa.Column("measured_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("pushed_back_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("tenant_id", name=op.f("pk_batch_feeds")),
    )


def downgrade() -> None:
    for table in ("batch_feeds", "batch_chunks", "batches", "file_parts", "files"):
        op.drop_table(table)


def _create_files() -> None:
    op.create_table(
        "files",
        sa.Column("id", sa.String(63), nullable=False),
        sa.Column("tenant_id", sa.String(63), nullable=False),
        sa.Column("project_id", sa.String(32), nullable=True),
        sa.Column("name", sa.String(255), nullable=False),
        sa.Column("purpose", sa.String(32), nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column("lines", sa.BigInteger(), nullable=False),
        sa.Column("parts", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("is_visible", sa.Boolean(), nullable=False),
        sa.ForeignKeyConstraint(
            ["tenant_id"],
            ["tenants.id"],
            name=op.f("fk_files_tenant_id_tenants"),
            ondelete="RESTRICT",
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_files")),
    )
    op.create_index("ix_files_tenant_id", "files", ["tenant_id", "created_at", "id"])
    op.create_index("ix_files_expires_at", "files", ["expires_at"])
    op.create_table(
        "file_parts",
        sa.Column("file_id", sa.String(63), nullable=False),
        sa.Column("number", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("key", sa.String(200), nullable=False),
        sa.Column("start", sa.BigInteger(), nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(
            ["file_id"],
            ["files.id"],
            name=op.f("fk_file_parts_file_id_files"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("file_id", "number", name=op.f("pk_file_parts")),
    )


def _create_batches() -> None:
    op.create_table(
        "batches",
        sa.Column("id", sa.String(63), nullable=False),
        sa.Column("tenant_id", sa.String(63), nullable=False),
        sa.Column("project_id", sa.String(32), nullable=True),
        sa.Column("credential_id", sa.String(), nullable=False),
        sa.Column("allowed_models", sa.JSON(), nullable=True),
        sa.Column("dialect", sa.String(32), nullable=True),
        sa.Column("endpoint", sa.String(63), nullable=False),
        sa.Column("input_file_id", sa.String(63), nullable=False),
        sa.Column("output_file_id", sa.String(63), nullable=True),
        sa.Column("error_file_id", sa.String(63), nullable=True),
        sa.Column("completion_window", sa.String(16), nullable=False),
        sa.Column("metadata", sa.JSON(), nullable=True),
        sa.Column("output_seconds", sa.BigInteger(), nullable=True),
        sa.Column("status", sa.String(32), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=False),
        *(sa.Column(f"{name}_at", sa.DateTime(timezone=True), nullable=True) for name in TIMES),
        sa.Column("errors", sa.JSON(), nullable=True),
        sa.Column("models", sa.JSON(), nullable=False),
        *(sa.Column(name, sa.BigInteger(), nullable=False) for name in COUNTS),
        sa.Column("claimed_until", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(
            ["tenant_id"],
            ["tenants.id"],
            name=op.f("fk_batches_tenant_id_tenants"),
            ondelete="RESTRICT",
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_batches")),
    )
    op.create_index("ix_batches_tenant_id", "batches", ["tenant_id", "created_at", "id"])
    op.create_index("ix_batches_status", "batches", ["status", "expires_at"])
    op.create_index("ix_batches_input_file_id", "batches", ["input_file_id"])
