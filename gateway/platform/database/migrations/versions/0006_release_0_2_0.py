"""The schema of release 0.2.0, which later revisions change; `schema` creates new databases."""

revision = "0006"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    pass
