"""`sluice exports`: the ledger on its way to billing systems."""

import click

from gateway.database.tables import BatchState, ExportBatchRow
from gateway.management.exports.schemas import ExportBatchBody, ExportBody
from gateway.management.exports.service import ExportService
from gateway.management.exports.store import ExportState
from gateway.terminal.entities import prints, table
from gateway.terminal.options import Stores, with_database
from gateway.terminal.output import show_time

EPILOG = """\
\b
Examples:
  sluice exports list
  sluice exports batches stripe --state rejected
  sluice exports retry stripe                  all rejected batches
  sluice exports retry stripe 17
  sluice exports discard stripe 18
  sluice exports pause stripe
"""


def _to_row(export: ExportState) -> tuple[str, ...]:
    return (
        export.name,
        export.kind,
        "paused" if export.paused_at else "active",
        str(export.lag_rows),
        "-" if export.oldest_at is None else show_time(export.oldest_at),
        *(str(export.batches[state]) for state in BatchState),
        export.last_error or "-",
    )


def _to_batch_row(batch: ExportBatchRow) -> tuple[str, ...]:
    return (
        str(batch.id),
        batch.state,
        str(batch.rows),
        batch.identifier or "-",
        batch.tenant_id or "-",
        "-" if batch.cost_micros is None else str(batch.cost_micros),
        str(batch.attempts),
        batch.last_error or "-",
    )


@click.group("exports", epilog=EPILOG)
def command() -> None:
    """List, pause and repair the export of the ledger to billing systems."""


@command.command("list")
@prints(
    table(
        (
            *("SINK", "KIND", "STATE", "ROWS", "OLDEST"),
            *(state.upper() for state in BatchState),
            "LAST ERROR",
        ),
        _to_row,
    ),
    ExportBody.of,
)
@with_database
async def list_exports(stores: Stores) -> list[ExportState]:
    """List all sinks, and how far the export is."""
    return await ExportService(stores.database).list_all()


@command.command()
@click.argument("sink")
@click.option("--state", type=click.Choice([state.value for state in BatchState]))
@click.option("--after", type=click.IntRange(min=0), default=0, help="Id of the last batch shown.")
@prints(
    table(
        ("BATCH", "STATE", "ROWS", "EVENT", "TENANT", "MICROS", "ATTEMPTS", "LAST ERROR"),
        _to_batch_row,
    ),
    ExportBatchBody.of,
)
@with_database
async def batches(
    stores: Stores, sink: str, *, state: str | None, after: int
) -> list[ExportBatchRow]:
    """List at most 100 batches that SINK has not confirmed."""
    wanted = None if state is None else BatchState(state)
    return await ExportService(stores.database).batches(sink, wanted, after=after)


@command.command()
@click.argument("sink")
@with_database
async def pause(stores: Stores, sink: str) -> None:
    """Send nothing more to SINK; new usage waits."""
    await ExportService(stores.database).pause(sink, actor=stores.actor)
    click.echo(f"Paused {sink}.")


@command.command()
@click.argument("sink")
@with_database
async def resume(stores: Stores, sink: str) -> None:
    """Send to SINK again, at once."""
    await ExportService(stores.database).resume(sink, actor=stores.actor)
    click.echo(f"Resumed {sink}.")


@command.command()
@click.argument("sink")
@click.argument("batch", type=int, required=False)
@with_database
async def retry(stores: Stores, sink: str, batch: int | None) -> None:
    """Send the rejected or uncertain BATCH (its id) to SINK again; default: all rejected ones."""
    number = await ExportService(stores.database).retry(sink, batch, actor=stores.actor)
    click.echo(f"{number} batches are sent again within seconds.")


@command.command()
@click.argument("sink")
@click.argument("batch", type=int)
@with_database
async def discard(stores: Stores, sink: str, batch: int) -> None:
    """Never send the rejected or uncertain BATCH (its id), because SINK has its event."""
    await ExportService(stores.database).discard(sink, batch, actor=stores.actor)
    click.echo(f"Discarded {batch}.")


@command.command()
@click.argument("sink")
@with_database
async def remove(stores: Stores, sink: str) -> None:
    """Remove SINK, which is no longer configured, with its position and batches."""
    await ExportService(stores.database).remove(sink, actor=stores.actor)
    click.echo(f"Removed {sink}.")
