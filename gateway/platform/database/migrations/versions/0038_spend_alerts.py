"""Spend alerts."""

import sqlalchemy as sa
from alembic import op

revision = "0038"
down_revision = "0037"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "spend_alerts",
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("tenant_id", sa.String(63), nullable=False),
        sa.Column("project_id", sa.String(32)),
        sa.Column("amount_micros", sa.BigInteger(), nullable=False),
        sa.Column("recipients", sa.JSON(), nullable=False),
        sa.Column("subject_prefix", sa.String(200)),
        sa.Column("sent_month", sa.String(7), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], ondelete="RESTRICT"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_spend_alerts")),
    )
    op.create_index(op.f("ix_spend_alerts_tenant_id"), "spend_alerts", ["tenant_id"])


def downgrade() -> None:
    op.drop_table("spend_alerts")
