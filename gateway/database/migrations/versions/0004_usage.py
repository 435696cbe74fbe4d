"""The usage ledger, its sums, and the marks of hours whose sums are outdated."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

BIG_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    _create_ledger()
    _create_rollups()
    op.create_table(
        "usage_dirty_hours",
        sa.Column("id", BIG_ID, autoincrement=True, nullable=False),
        sa.Column("hour", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_usage_dirty_hours")),
    )
    _forbid_changes("usage_ledger")


def downgrade() -> None:
    for table in ("usage_dirty_hours", "usage_rollups", "usage_ledger"):
        op.drop_table(table)


def _create_ledger() -> None:
    op.create_table(
        "usage_ledger",
        sa.Column("request_id", sa.String(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("ended_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("tenant_id", sa.String(), nullable=False),
        sa.Column("project_id", sa.String(), nullable=True),
        sa.Column("credential_id", sa.String(), nullable=False),
        sa.Column("model", sa.String(), nullable=False),
        sa.Column("endpoint", sa.String(), nullable=False),
        sa.Column("dialect", sa.String(), nullable=False),
        sa.Column("service_tier", sa.String(32), nullable=False),
        sa.Column("is_streamed", sa.Boolean(), nullable=False),
        sa.Column("is_prepaid", sa.Boolean(), nullable=False),
        sa.Column("gateway", sa.String(), nullable=False),
        sa.Column("jobs", sa.BigInteger(), nullable=False),
        sa.Column("prompt_price", sa.BigInteger(), nullable=False),
        sa.Column("cached_price", sa.BigInteger(), nullable=False),
        sa.Column("completion_price", sa.BigInteger(), nullable=False),
        sa.Column("outcome", sa.String(32), nullable=False),
        sa.Column("code", sa.String(), nullable=False),
        sa.Column("prompt_tokens", sa.BigInteger(), nullable=False),
        sa.Column("cached_tokens", sa.BigInteger(), nullable=False),
        sa.Column("completion_tokens", sa.BigInteger(), nullable=False),
        sa.Column("cost_micros", sa.BigInteger(), nullable=False),
        sa.Column("first_token_ms", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("request_id", "created_at", name=op.f("pk_usage_ledger")),
        # Partitions are created ahead of their months, see `gateway.database.ledger.partitions`.
        postgresql_partition_by="RANGE (created_at)",
    )
    for column in ("tenant_id", "project_id", "credential_id"):
        op.create_index(
            f"ix_usage_ledger_{column}",
            "usage_ledger",
            [column, "created_at"],
            postgresql_include=["prompt_tokens", "completion_tokens", "cost_micros"],
        )
    op.create_index("ix_usage_ledger_created_at", "usage_ledger", ["created_at"])
    op.create_index(
        "ix_usage_ledger_prepaid",
        "usage_ledger",
        ["tenant_id", "cost_micros"],
        postgresql_where=sa.text("is_prepaid"),
        sqlite_where=sa.text("is_prepaid"),
    )


def _create_rollups() -> None:
    key = ("period", "start_at", "tenant_id", "project_id", "credential_id", "model")
    op.create_table(
        "usage_rollups",
        sa.Column("period", sa.String(32), nullable=False),
        sa.Column("start_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("tenant_id", sa.String(), nullable=False),
        sa.Column("project_id", sa.String(), nullable=False),
        sa.Column("credential_id", sa.String(), nullable=False),
        sa.Column("model", sa.String(), nullable=False),
        sa.Column("service_tier", sa.String(32), nullable=False),
        sa.Column("requests", sa.BigInteger(), nullable=False),
        sa.Column("failed_requests", sa.BigInteger(), nullable=False),
        sa.Column("prompt_tokens", sa.BigInteger(), nullable=False),
        sa.Column("cached_tokens", sa.BigInteger(), nullable=False),
        sa.Column("completion_tokens", sa.BigInteger(), nullable=False),
        sa.Column("cost_micros", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint(*key, "service_tier", name=op.f("pk_usage_rollups")),
    )
    op.create_index(
        "ix_usage_rollups_tenant_id", "usage_rollups", ["tenant_id", "period", "start_at"]
    )


def _forbid_changes(table: str) -> None:
    if op.get_context().dialect.name == "postgresql":
        # Partitions inherit the trigger when they are attached.
        op.execute(
            f"CREATE TRIGGER {table}_append_only BEFORE UPDATE OR DELETE ON {table} "
            "FOR EACH ROW EXECUTE FUNCTION sluice_append_only()"
        )
        return
    for verb in ("UPDATE", "DELETE"):
        op.execute(
            f"CREATE TRIGGER {table}_no_{verb.lower()} BEFORE {verb} ON {table} "
            f"BEGIN SELECT RAISE(ABORT, 'rows of {table} are only ever added'); END"
        )
