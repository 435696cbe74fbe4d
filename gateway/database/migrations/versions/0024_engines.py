"""The engine that ran each request, in the usage ledger."""

import sqlalchemy as sa
from alembic import op

revision = "0024"
down_revision = "0023"
branch_labels = None
depends_on = None


def upgrade() -> None:
    # Rows are never changed: the engine of earlier rows is unknown.
    op.add_column(
        "usage_ledger", sa.Column("engine", sa.String(), server_default="", nullable=False)
    )


def downgrade() -> None:
    op.drop_column("usage_ledger", "engine")
