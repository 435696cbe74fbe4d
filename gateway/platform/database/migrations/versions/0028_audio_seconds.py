"""Seconds of audio, in the ledger and its sums, and their prices."""

import sqlalchemy as sa
from alembic import op

revision = "0028"
down_revision = "0027"
branch_labels = None
depends_on = None

_COLUMNS = (
    *(("usage_ledger", name) for name in ("audio_price", "audio_seconds", "free_audio_seconds")),
    ("usage_rollups", "audio_seconds"),
    ("prices", "audio_micros"),
)


def upgrade() -> None:
    for table, name in _COLUMNS:
        op.add_column(table, sa.Column(name, sa.BigInteger(), server_default="0", nullable=False))


def downgrade() -> None:
    for table, name in _COLUMNS:
        op.drop_column(table, name)
