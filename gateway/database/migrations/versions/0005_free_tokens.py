"""Tokens that are not paid for, in the ledger of usage."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

COLUMNS = ("free_prompt_tokens", "free_cached_tokens", "free_completion_tokens")


def upgrade() -> None:
    # Rows are never changed: those from before have 0 here, and their cost is what was charged.
    for column in COLUMNS:
        op.add_column(
            "usage_ledger", sa.Column(column, sa.BigInteger(), server_default="0", nullable=False)
        )


def downgrade() -> None:
    for column in COLUMNS:
        op.drop_column("usage_ledger", column)
