"""An index of spend limits by their holders."""

from alembic import op

revision = "0036"
down_revision = "0035"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_index("ix_spend_limits_holder", "spend_limits", ["tenant_id", "scope", "holder"])
    op.drop_index("ix_spend_limits_tenant_id", table_name="spend_limits")


def downgrade() -> None:
    op.create_index("ix_spend_limits_tenant_id", "spend_limits", ["tenant_id"])
    op.drop_index("ix_spend_limits_holder", table_name="spend_limits")
