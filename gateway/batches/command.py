"""`sluice batches`: progress of batches."""

import click

from gateway.batches.schemas import BatchBody
from gateway.batches.service import BatchService
from gateway.database.paging import MAX_PAGE, PageRequest
from gateway.files.store import Owner
from gateway.tenancy.batches import Batch
from gateway.terminal.entities import print_fields, prints, table
from gateway.terminal.options import Stores, with_database
from gateway.terminal.output import show_time

EPILOG = """\
\b
Examples:
  sluice batches list acme
  sluice batches show acme batch_0123456789abcdef0123456789abcdef
  sluice batches cancel acme batch_0123456789abcdef0123456789abcdef
"""


def _to_row(batch: Batch) -> tuple[str, ...]:
    return (
        batch.id,
        batch.status,
        f"{batch.completed}/{batch.total}",
        str(batch.failed),
        show_time(batch.created_at),
        show_time(batch.expires_at),
    )


_HEADINGS = ("ID", "STATUS", "COMPLETED", "FAILED", "CREATED", "DEADLINE")


@click.group("batches", epilog=EPILOG)
def command() -> None:
    """List, show and cancel a tenant's batches."""


@command.command("list")
@click.argument("tenant")
@click.option("--after", metavar="ID", help="Id of the last batch of the previous page.")
@prints(table(_HEADINGS, _to_row), BatchBody.of)
@with_database
async def list_batches(stores: Stores, tenant: str, *, after: str | None) -> list[Batch]:
    """List the newest batches of TENANT (its id)."""
    wanted = PageRequest(after, MAX_PAGE, is_newest_first=True)
    return (await _service(stores).page(Owner(tenant), wanted)).entries


@command.command()
@click.argument("tenant")
@click.argument("batch")
@prints(print_fields)
@with_database
async def show(stores: Stores, tenant: str, batch: str) -> BatchBody:
    """Show the progress of BATCH (its id)."""
    return BatchBody.of(await _service(stores).get(Owner(tenant), batch))


@command.command()
@click.argument("tenant")
@click.argument("batch")
@with_database
async def cancel(stores: Stores, tenant: str, batch: str) -> None:
    """Cancel BATCH (its id); lines that have ended stay in its result files."""
    cancelled = await _service(stores).cancel(Owner(tenant), batch)
    click.echo(f"{batch} is {cancelled.status}.")


def _service(stores: Stores) -> BatchService:
    return BatchService(stores.settings, stores.database)
