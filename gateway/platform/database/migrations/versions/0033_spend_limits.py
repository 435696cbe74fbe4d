"""Spend limits, time zones of tenants, and end users in the ledger."""

import sqlalchemy as sa
from alembic import op

revision = "0033"
down_revision = "0032"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "spend_limits",
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("tenant_id", sa.String(63), nullable=False),
        sa.Column("scope", sa.String(), nullable=False),
        sa.Column("holder", sa.String(300)),
        sa.Column("model", sa.String(300)),
        sa.Column("window", sa.String(), nullable=False),
        sa.Column("starts_on", sa.Integer(), nullable=False),
        sa.Column("amount_micros", sa.BigInteger()),
        sa.Column("limits", sa.JSON(), nullable=False),
        sa.Column("raised_micros", sa.BigInteger()),
        sa.Column("raised_until", sa.DateTime(timezone=True)),
        sa.Column("raise_reason", sa.String(300)),
        sa.Column("is_automatic", sa.Boolean(), nullable=False),
        sa.Column("is_enforced", sa.Boolean(), nullable=False),
        sa.Column("is_operators", sa.Boolean(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], ondelete="RESTRICT"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_spend_limits")),
    )
    op.create_index(op.f("ix_spend_limits_tenant_id"), "spend_limits", ["tenant_id"])
    zone = sa.Column("time_zone", sa.String(63), server_default="UTC", nullable=False)
    action = sa.Column("anomaly_action", sa.String(), server_default="stop", nullable=False)
    for column in (zone, sa.Column("anomaly_factor", sa.Integer()), action):
        op.add_column("tenants", column)
    user = sa.Column("end_user", sa.String(), server_default="", nullable=False)
    op.add_column("usage_ledger", user)
    is_named = sa.text("end_user <> ''")
    op.create_index(
        "ix_usage_ledger_end_user",
        "usage_ledger",
        ["tenant_id", "end_user", "created_at"],
        postgresql_where=is_named,
        sqlite_where=is_named,
    )


def downgrade() -> None:
    op.drop_index("ix_usage_ledger_end_user", table_name="usage_ledger")
    op.drop_column("usage_ledger", "end_user")
    for name in ("anomaly_action", "anomaly_factor", "time_zone"):
        op.drop_column("tenants", name)
    op.drop_table("spend_limits")
