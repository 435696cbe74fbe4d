"""Removals of prices, in a table of their own: rows of both are only ever added."""

import sqlalchemy as sa
from alembic import op

revision = "0029"
down_revision = "0028"
branch_labels = None
depends_on = None

_TABLE = "price_removals"
_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        _TABLE,
        sa.Column("price_id", _ID, nullable=False),
        sa.Column("removed_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(
            ["price_id"],
            ["prices.id"],
            name=op.f("fk_price_removals_price_id_prices"),
            ondelete="RESTRICT",
        ),
        sa.PrimaryKeyConstraint("price_id", name=op.f("pk_price_removals")),
    )
    if op.get_bind().dialect.name == "postgresql":
        op.execute(
            f"CREATE TRIGGER {_TABLE}_append_only BEFORE UPDATE OR DELETE ON {_TABLE} "
            "FOR EACH ROW EXECUTE FUNCTION sluice_append_only()"
        )
        return
    for verb in ("UPDATE", "DELETE"):
        op.execute(
            f"CREATE TRIGGER {_TABLE}_no_{verb.lower()} BEFORE {verb} ON {_TABLE} "
            f"BEGIN SELECT RAISE(ABORT, 'rows of {_TABLE} are only ever added'); END"
        )


def downgrade() -> None:
    op.drop_table(_TABLE)
