"""Dialects of tenants and keys, and a tenant's strictness and default model."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("tenants", sa.Column("dialect", sa.String(32), nullable=True))
    # The previous release continues to insert tenants without this column.
    op.add_column(
        "tenants",
        sa.Column("strict_parameters", sa.Boolean(), nullable=False, server_default=sa.false()),
    )
    op.add_column("tenants", sa.Column("default_model", sa.String(200), nullable=True))
    op.add_column("api_keys", sa.Column("dialect", sa.String(32), nullable=True))


def downgrade() -> None:
    op.drop_column("api_keys", "dialect")
    op.drop_column("tenants", "default_model")
    op.drop_column("tenants", "strict_parameters")
    op.drop_column("tenants", "dialect")
