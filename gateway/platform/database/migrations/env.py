"""Run by alembic: applies revisions on the connection that `database.schema` hands over.

A new revision is a file in `versions/`, written by hand; the tests apply it to the baseline and
compare the result with the tables. The previous release must still run on it: add first, remove in
a later release.
"""

from alembic import context
from sqlalchemy import Connection

from gateway.platform.database.partitions import is_partition
from gateway.platform.database.tables import Table

connection: Connection = context.config.attributes["connection"]
context.configure(
    connection=connection,
    target_metadata=Table.metadata,
    render_as_batch=connection.dialect.name == "sqlite",
    include_name=lambda name, kind, _parents: kind != "table" or not is_partition(name or ""),
)
# The connection is already in a transaction, which applies all revisions or none.
with context.begin_transaction():
    context.run_migrations()
