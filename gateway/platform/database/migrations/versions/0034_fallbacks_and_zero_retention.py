"""Further models that an alias tries, in order, and tenants of whose requests nothing is kept."""

import sqlalchemy as sa
from alembic import op

revision = "0034"
down_revision = "0033"
branch_labels = None
depends_on = None


def upgrade() -> None:
    column = sa.Column("fallbacks", sa.JSON(), server_default="[]", nullable=False)
    op.add_column("model_aliases", column)
    column = sa.Column("zero_retention", sa.Boolean(), server_default=sa.false(), nullable=False)
    op.add_column("tenants", column)


def downgrade() -> None:
    op.drop_column("tenants", "zero_retention")
    op.drop_column("model_aliases", "fallbacks")
