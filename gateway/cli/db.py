"""`sluice db`: the database schema."""

import click

from gateway.cli.calls import runs_async
from gateway.cli.deployment import command_settings
from gateway.cli.terminal import DATABASE, JSON, print_json
from gateway.platform.database import schema
from gateway.platform.database.engine import Database
from gateway.platform.database.schema import SchemaState

EPILOG = """\
\b
Examples:
  sluice db upgrade
  sluice db status --database-url postgresql://sluice@db.internal/sluice
"""

MEANINGS = {
    SchemaState.EMPTY: "The database is empty: run `sluice db upgrade`.",
    SchemaState.OUTDATED: "The schema is outdated: run `sluice db upgrade`.",
    SchemaState.CURRENT: "The schema is current.",
    SchemaState.NEWER: "A later release created the schema; this release can run on it.",
}


@click.group("db", epilog=EPILOG)
def command() -> None:
    """Create or upgrade the database schema."""


@command.command(params=[DATABASE])
@runs_async
async def upgrade(database_url: str | None) -> None:
    """Create or upgrade the schema. Safe to run at any time, even several times at once."""
    settings = command_settings(database_url=database_url)
    await schema.upgrade(settings.database_url.get_secret_value())
    click.echo(MEANINGS[SchemaState.CURRENT])


@command.command(params=[JSON, DATABASE])
@runs_async
async def status(*, as_json: bool, database_url: str | None) -> None:
    """Show whether the schema is current; exit code 1 if it needs an upgrade."""
    settings = command_settings(database_url=database_url)
    database = Database(settings.database_url.get_secret_value())
    try:
        state = await schema.schema_state(database)
    finally:
        await database.aclose()
    if as_json:
        print_json({"schema": state.value})
    else:
        click.echo(MEANINGS[state])
    if not state.is_usable:
        raise click.exceptions.Exit(1)
