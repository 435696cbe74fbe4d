"""Prompt logs of tenants."""

import sqlalchemy as sa
from alembic import op

revision = "0039"
down_revision = "0038"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("tenants", sa.Column("prompt_log_key", sa.Text()))
    op.add_column("tenants", sa.Column("prompt_log_days", sa.Integer()))


def downgrade() -> None:
    op.drop_column("tenants", "prompt_log_days")
    op.drop_column("tenants", "prompt_log_key")
