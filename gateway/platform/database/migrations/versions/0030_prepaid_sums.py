"""Partial sums of the cost of prepaid requests, which a trigger of the ledger adds."""

import sqlalchemy as sa
from alembic import op

revision = "0030"
down_revision = "0029"
branch_labels = None
depends_on = None

_TABLE = "prepaid_sums"
_SUMS = "SELECT tenant_id, sum(cost_micros) FROM {} WHERE is_prepaid GROUP BY tenant_id"
_INSERTION = f"INSERT INTO {_TABLE} (tenant_id, cost_micros)"


def upgrade() -> None:
    op.create_table(
        _TABLE,
        sa.Column(
            "id",
            sa.BigInteger().with_variant(sa.Integer(), "sqlite"),
            autoincrement=True,
            nullable=False,
        ),
        sa.Column("tenant_id", sa.String(), nullable=False),
        sa.Column("cost_micros", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_prepaid_sums")),
    )
    op.create_index(op.f("ix_prepaid_sums_tenant_id"), _TABLE, ["tenant_id"])
    event = f"CREATE TRIGGER usage_ledger_{_TABLE} AFTER INSERT ON usage_ledger"
    if op.get_bind().dialect.name == "postgresql":
        body = f"BEGIN {_INSERTION} {_SUMS.format('added')}; RETURN NULL; END"
        op.execute(
            f"CREATE FUNCTION sluice_sum_prepaid() RETURNS trigger LANGUAGE plpgsql AS $$ {body} $$"
        )
        # This waits until no transaction inserts rows, and none can until the upgrade ends.
        rows = "REFERENCING NEW TABLE AS added FOR EACH STATEMENT"
        op.execute(f"{event} {rows} EXECUTE FUNCTION sluice_sum_prepaid()")
    else:
        values = "VALUES (NEW.tenant_id, NEW.cost_micros)"
        op.execute(f"{event} WHEN NEW.is_prepaid BEGIN {_INSERTION} {values}; END")
    op.execute(f"{_INSERTION} {_SUMS.format('usage_ledger')}")


def downgrade() -> None:
    is_postgresql = op.get_bind().dialect.name == "postgresql"
    op.execute(
        f"DROP TRIGGER usage_ledger_{_TABLE}" + (" ON usage_ledger" if is_postgresql else "")
    )
    if is_postgresql:
        op.execute("DROP FUNCTION sluice_sum_prepaid()")
    op.drop_table(_TABLE)
