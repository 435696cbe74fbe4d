"""How often requests were preempted, in the ledger."""

import sqlalchemy as sa
from alembic import op

revision = "0026"
down_revision = "0025"
branch_labels = None
depends_on = None

_COUNTS = ("preemptions", "recomputed_tokens")


def upgrade() -> None:
    for name in _COUNTS:
        op.add_column(
            "usage_ledger", sa.Column(name, sa.BigInteger(), server_default="0", nullable=False)
        )


def downgrade() -> None:
    for name in _COUNTS:
        op.drop_column("usage_ledger", name)
