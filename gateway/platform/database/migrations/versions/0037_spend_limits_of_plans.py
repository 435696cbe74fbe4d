"""Spend limits of plans."""

import sqlalchemy as sa
from alembic import op

revision = "0037"
down_revision = "0036"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column(
        "plans", sa.Column("spend_limits", sa.JSON(), server_default="{}", nullable=False)
    )
    op.add_column(
        "spend_limits",
        sa.Column("is_from_plan", sa.Boolean(), server_default=sa.false(), nullable=False),
    )


def downgrade() -> None:
    op.drop_column("spend_limits", "is_from_plan")
    op.drop_column("plans", "spend_limits")
