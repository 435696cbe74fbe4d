"""When batches are due, how often that failed, and an index of chunks by state."""

import sqlalchemy as sa
from alembic import op

revision = "0025"
down_revision = "0024"
branch_labels = None
depends_on = None

_TIMES = ("due_at", "resting_until")
_PAST = "1970-01-01 00:00:00"


def upgrade() -> None:
    for name in _TIMES:
        time = sa.DateTime(timezone=True)
        op.add_column("batches", sa.Column(name, time, server_default=_PAST, nullable=False))
    op.add_column(
        "batches", sa.Column("attempts", sa.BigInteger(), server_default="0", nullable=False)
    )
    op.create_index("ix_batch_chunks_batch_id", "batch_chunks", ["batch_id", "state", "number"])


def downgrade() -> None:
    op.drop_index("ix_batch_chunks_batch_id", "batch_chunks")
    op.drop_column("batches", "attempts")
    for name in _TIMES:
        op.drop_column("batches", name)
