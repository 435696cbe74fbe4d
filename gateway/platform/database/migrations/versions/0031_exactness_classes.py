"""The exactness classes of the engines that ran a request, in the ledger."""

import sqlalchemy as sa
from alembic import op

revision = "0031"
down_revision = "0030"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column(
        "usage_ledger",
        sa.Column("exactness_class", sa.String(), server_default="", nullable=False),
    )
    op.add_column(
        "usage_ledger",
        sa.Column("class_crossings", sa.BigInteger(), server_default="0", nullable=False),
    )


def downgrade() -> None:
    op.drop_column("usage_ledger", "class_crossings")
    op.drop_column("usage_ledger", "exactness_class")
