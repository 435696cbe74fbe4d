"""Export of the ledger to billing systems."""

import sqlalchemy as sa
from alembic import op

revision = "0023"
down_revision = "0022"
branch_labels = None
depends_on = None

_SERIAL = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def _time(name: str, *, nullable: bool = False) -> sa.Column[object]:
    return sa.Column(name, sa.DateTime(timezone=True), nullable=nullable)


def upgrade() -> None:
    op.add_column("tenants", sa.Column("stripe_customer_id", sa.String(255), nullable=True))
    op.create_table(
        "usage_positions",
        sa.Column("position", _SERIAL, nullable=False, autoincrement=True),
        sa.Column("request_id", sa.String(), nullable=False),
        _time("created_at"),
        sa.PrimaryKeyConstraint("position", name=op.f("pk_usage_positions")),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "export_sinks",
        sa.Column("name", sa.String(32), nullable=False),
        sa.Column("kind", sa.String(32), nullable=False),
        sa.Column("tag", sa.String(8), nullable=False),
        sa.Column("position", sa.BigInteger(), nullable=False),
        _time("closed_at"),
        _time("created_at"),
        _time("paused_at", nullable=True),
        sa.Column("lease", sa.String(32), nullable=False),
        _time("leased_until"),
        sa.Column("failures", sa.BigInteger(), nullable=False),
        _time("next_attempt_at"),
        sa.Column("last_error", sa.String(200), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_export_sinks")),
    )
    states = ("pending", "held", "rejected", "uncertain")
    op.create_table(
        "export_batches",
        sa.Column("id", _SERIAL, nullable=False, autoincrement=True),
        sa.Column("sink", sa.String(32), nullable=False),
        sa.Column(
            "state",
            sa.Enum(*states, name="state", native_enum=False, create_constraint=True, length=32),
            nullable=False,
        ),
        sa.Column("after", sa.BigInteger(), nullable=False),
        sa.Column("upto", sa.BigInteger(), nullable=False),
        sa.Column("rows", sa.BigInteger(), nullable=False),
        _time("oldest_at"),
        sa.Column("identifier", sa.String(120), nullable=False),
        sa.Column("tenant_id", sa.String(), nullable=True),
        sa.Column("customer", sa.String(255), nullable=False),
        sa.Column("cost_micros", sa.BigInteger(), nullable=True),
        _time("occurred_at"),
        sa.Column("attempts", sa.BigInteger(), nullable=False),
        _time("uncertain_since", nullable=True),
        sa.Column("last_error", sa.String(200), nullable=False),
        sa.ForeignKeyConstraint(
            ["sink"],
            ["export_sinks.name"],
            name=op.f("fk_export_batches_sink_export_sinks"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_export_batches")),
    )
    op.create_index("ix_export_batches_sink", "export_batches", ["sink", "state", "attempts", "id"])
    op.create_index("ix_export_batches_identifier", "export_batches", ["sink", "identifier"])


def downgrade() -> None:
    op.drop_table("export_batches")
    op.drop_table("export_sinks")
    op.drop_table("usage_positions")
    op.drop_column("tenants", "stripe_customer_id")
