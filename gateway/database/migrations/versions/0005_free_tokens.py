"""Tokens that are not charged, in the usage ledger."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

COLUMNS = ("free_prompt_tokens", "free_cached_tokens", "free_completion_tokens")


def upgrade() -> None:
    # Rows are never changed: earlier rows have 0 here, and their cost is the charged amount.
    for column in COLUMNS:
        op.add_column(
            "usage_ledger", sa.Column(column, sa.BigInteger(), server_default="0", nullable=False)
        )


def downgrade() -> None:
    for column in COLUMNS:
        op.drop_column("usage_ledger", column)
