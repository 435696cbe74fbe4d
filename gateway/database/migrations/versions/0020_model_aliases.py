"""Aliases of models."""

import sqlalchemy as sa
from alembic import op

revision = "0020"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "model_aliases",
        sa.Column("name", sa.String(200), nullable=False),
        sa.Column("weights", sa.JSON(), nullable=False),
        sa.Column("sticky", sa.String(32), nullable=False),
        sa.Column("fallback", sa.String(200), nullable=True),
        sa.Column("sunset_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("deprecated_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("replacement", sa.String(200), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_model_aliases")),
    )


def downgrade() -> None:
    op.drop_table("model_aliases")
