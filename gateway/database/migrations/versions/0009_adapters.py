"""Adapters."""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "adapters",
        sa.Column("id", sa.String(63), nullable=False),
        sa.Column("tenant_id", sa.String(63), nullable=False),
        sa.Column("name", sa.String(63), nullable=False),
        sa.Column("base_model", sa.String(200), nullable=False),
        sa.Column("source", sa.String(1000), nullable=False),
        sa.Column("is_shared", sa.Boolean(), nullable=False),
        sa.Column("state", sa.String(32), nullable=False),
        sa.Column("reason", sa.String(500), nullable=False),
        sa.Column("sha256", sa.String(64), nullable=False),
        sa.Column("rank", sa.BigInteger(), nullable=False),
        sa.Column("target_modules", sa.JSON(), nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column("is_stored", sa.Boolean(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("deleted_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("claimed_until", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(
            ["tenant_id"],
            ["tenants.id"],
            name=op.f("fk_adapters_tenant_id_tenants"),
            ondelete="RESTRICT",
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_adapters")),
    )
    op.create_index("ix_adapters_tenant_id", "adapters", ["tenant_id", "created_at", "id"])
    op.create_index("ix_adapters_state", "adapters", ["state", "claimed_until"])
    op.create_index("ix_adapters_sha256", "adapters", ["sha256"])


def downgrade() -> None:
    op.drop_table("adapters")
