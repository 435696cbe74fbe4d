"""Secrets of webhooks that are encrypted. The column of plain ones is emptied by a background job."""

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
