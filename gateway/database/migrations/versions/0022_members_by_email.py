"""Members by e-mail, and the issuers of members' subjects."""

import sqlalchemy as sa
from alembic import op

revision = "0022"
down_revision = "0020"
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table("members") as table:
        table.alter_column(
            "subject", existing_type=sa.String(200), type_=sa.String(255), nullable=True
        )
        table.add_column(sa.Column("issuer", sa.String(255), nullable=True))
        table.add_column(sa.Column("email", sa.String(200), nullable=True))
        table.create_unique_constraint(op.f("uq_members_email"), ["tenant_id", "email"])
    op.create_index(op.f("ix_members_subject"), "members", ["subject"])
    op.create_index(op.f("ix_members_email"), "members", ["email"])


def downgrade() -> None:
    op.drop_index(op.f("ix_members_email"), "members")
    op.drop_index(op.f("ix_members_subject"), "members")
    # The former release has no invited people.
    op.execute("DELETE FROM members WHERE subject IS NULL")
    with op.batch_alter_table("members") as table:
        table.drop_constraint(op.f("uq_members_email"), type_="unique")
        table.drop_column("email")
        table.drop_column("issuer")
        table.alter_column(
            "subject", existing_type=sa.String(255), type_=sa.String(200), nullable=False
        )
