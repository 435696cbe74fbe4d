"""The schema that later revisions change; `database.schema` creates new databases."""

revision = "0024"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    pass
