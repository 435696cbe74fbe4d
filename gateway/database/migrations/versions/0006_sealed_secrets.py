"""Encrypted webhook secrets. A background job clears the column of plain secrets."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("webhooks", sa.Column("sealed_secret", sa.LargeBinary(500), nullable=True))


def downgrade() -> None:
    op.drop_column("webhooks", "sealed_secret")
