"""Limits of equal requests of a key."""

import sqlalchemy as sa
from alembic import op

revision = "0035"
down_revision = "0034"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("tenants", sa.Column("anomaly_repeats", sa.Integer()))
    op.add_column("spend_limits", sa.Column("repeats", sa.Integer()))


def downgrade() -> None:
    op.drop_column("spend_limits", "repeats")
    op.drop_column("tenants", "anomaly_repeats")
