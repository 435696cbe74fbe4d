"""Origins of web pages that may use a tenant's keys."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    # Null, also for tenants that the previous release inserts: none.
    op.add_column("tenants", sa.Column("cors_origins", sa.JSON(), nullable=True))


def downgrade() -> None:
    op.drop_column("tenants", "cors_origins")
