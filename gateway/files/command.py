"""`sluice files`: input files and results of batches."""

import click

from gateway.database.paging import MAX_PAGE, PageRequest
from gateway.files.schemas import FileBody
from gateway.files.service import FileService
from gateway.files.store import Owner
from gateway.tenancy.batches import File
from gateway.terminal.entities import prints, table
from gateway.terminal.options import Stores, with_database
from gateway.terminal.output import show_time

EPILOG = """\
\b
Examples:
  sluice files list acme
  sluice files delete acme file-0123456789abcdef0123456789abcdef
"""


def _to_row(file: File) -> tuple[str, ...]:
    expires = "-" if file.expires_at is None else show_time(file.expires_at)
    return (file.id, file.name, file.purpose, str(file.size), str(file.lines), expires)


@click.group("files", epilog=EPILOG)
def command() -> None:
    """List and delete a tenant's files."""


@command.command("list")
@click.argument("tenant")
@click.option("--after", metavar="ID", help="Id of the last file of the previous page.")
@prints(table(("ID", "NAME", "PURPOSE", "BYTES", "LINES", "EXPIRES"), _to_row), FileBody.of)
@with_database
async def list_files(stores: Stores, tenant: str, *, after: str | None) -> list[File]:
    """List the newest files of TENANT (its id)."""
    wanted = PageRequest(after, MAX_PAGE, is_newest_first=True)
    return (await file_service(stores).page(Owner(tenant), wanted)).entries


@command.command()
@click.argument("tenant")
@click.argument("file")
@with_database
async def delete(stores: Stores, tenant: str, file: str) -> None:
    """Delete FILE (its id) with its content, unless a batch still uses it."""
    await file_service(stores).delete(Owner(tenant), file)
    click.echo(f"Deleted {file}.")


def file_service(stores: Stores) -> FileService:
    """Return the files of the deployment that a command manages."""
    return FileService(stores.settings, stores.database)
