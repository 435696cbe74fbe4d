"""Engines of requests, times to the first token in sums, and sums for the status page."""

import sqlalchemy as sa
from alembic import op

revision = "0024"
down_revision = "0023"
branch_labels = None
depends_on = None

_BOUNDS_MS = (
    *(8, 11, 16, 23, 32, 45, 64, 91, 128, 181, 256, 362, 512, 724, 1024, 1448, 2048, 2896, 4096),
    *(5793, 8192, 11585, 16384, 23170, 32768, 46341, 65536, 92682, 131072, 185364, 262144, 370728),
    *(524288, 741455, 1048576),
)
_BUCKETS = (*(f"first_token_le_{bound}" for bound in _BOUNDS_MS), "first_token_more")


def _buckets() -> list[sa.Column[int]]:
    return [sa.Column(name, sa.BigInteger(), nullable=True) for name in _BUCKETS]


def upgrade() -> None:
    # Rows are never changed: the engine of earlier rows is unknown.
    op.add_column(
        "usage_ledger", sa.Column("engine", sa.String(), server_default="", nullable=False)
    )
    # The hourly reconciliation computes the new sums of the last days. It would take long for all.
    for column in _buckets():
        op.add_column("usage_rollups", column)
    op.create_table(
        "service_rollups",
        sa.Column("period", sa.String(32), nullable=False),
        sa.Column("start_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("model", sa.String(), nullable=False),
        sa.Column("requests", sa.BigInteger(), nullable=False),
        sa.Column("failed_requests", sa.BigInteger(), nullable=False),
        *_buckets(),
        sa.PrimaryKeyConstraint("period", "start_at", "model", name=op.f("pk_service_rollups")),
    )
    op.create_table(
        "service_rejections",
        sa.Column("hour", sa.DateTime(timezone=True), nullable=False),
        sa.Column("model", sa.String(), nullable=False),
        sa.Column("requests", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("hour", "model", name=op.f("pk_service_rejections")),
    )


def downgrade() -> None:
    op.drop_table("service_rejections")
    op.drop_table("service_rollups")
    for name in _BUCKETS:
        op.drop_column("usage_rollups", name)
    op.drop_column("usage_ledger", "engine")
