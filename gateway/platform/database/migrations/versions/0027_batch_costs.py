"""What the completed lines of a batch cost."""

import sqlalchemy as sa
from alembic import op

revision = "0027"
down_revision = "0026"
branch_labels = None
depends_on = None


def upgrade() -> None:
    column = sa.Column("cost_micros", sa.BigInteger(), server_default="0", nullable=False)
    op.add_column("batches", column)


def downgrade() -> None:
    op.drop_column("batches", "cost_micros")
