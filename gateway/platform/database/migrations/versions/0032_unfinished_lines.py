"""Lines that did not end before their batch was cancelled or expired."""

import sqlalchemy as sa
from alembic import op

revision = "0032"
down_revision = "0031"
branch_labels = None
depends_on = None


def upgrade() -> None:
    column = sa.Column("unfinished", sa.BigInteger(), server_default="0", nullable=False)
    op.add_column("batches", column)


def downgrade() -> None:
    op.drop_column("batches", "unfinished")
