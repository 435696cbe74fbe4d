"""`sluice usage`: usage and its cost."""

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict
from functools import reduce
from typing import Any, Final, TextIO

import click

from gateway.database.schema import require_current_schema
from gateway.ledger.connections import open_ledger
from gateway.ledger.drain import Drain
from gateway.ledger.reconcile import ROLLUP_DAYS, ReconcileReport, reconcile
from gateway.management.tenants.service import TenantService
from gateway.management.usage.csv_text import to_csv
from gateway.management.usage.export import RECEIPT_COLUMNS, receipt_row
from gateway.management.usage.input import read_dimensions, read_month, read_span
from gateway.management.usage.parts import Dimension, UsageFilter
from gateway.management.usage.periods import Bucket
from gateway.management.usage.schemas import receipt_fields, usage_fields
from gateway.management.usage.service import ReportRequest, UsageService, UsageSlice
from gateway.redis_client import converting_errors
from gateway.tenancy.times import to_time
from gateway.tenancy.usage_record import UsageRecord
from gateway.terminal.entities import prints, table
from gateway.terminal.money import show_dollars
from gateway.terminal.options import (
    Decorator,
    Stores,
    command_settings,
    database_option,
    json_option,
    redis_option,
    runs_async,
    with_database,
)
from gateway.terminal.output import print_json, print_table, show_time

MAX_SHOWN: Final = 10_000
MAX_DAYS: Final = 4_000

EPILOG = """\
\b
Examples:
  sluice usage show --tenant acme --group-by model
  sluice usage show --bucket month --start 2026-01-01 --group-by tenant
  sluice usage requests --tenant acme --limit 20
  sluice usage export --tenant acme --month 2026-11 --output acme.csv
  sluice usage reconcile
"""

_FILTERS: Final = (
    click.option("--tenant", "tenant_id", help="Only this tenant."),
    click.option("--project", "project_id", help="Only this project, by its id."),
    click.option("--key", "credential_id", help="Only this key, by its id, or jwt:SUBJECT."),
    click.option("--model", help="Only this model."),
    click.option("--start", help="A date or time in UTC.  [default: 30 days before the end]"),
    click.option("--end", help="A date or time in UTC, exclusive.  [default: now]"),
)
limit_option: Decorator = click.option(
    "--limit",
    type=click.IntRange(1, MAX_SHOWN),
    default=100,
    show_default=True,
    help="Maximum number of lines.",
)


_COUNTS: Final = ("PROMPT", "CACHED", "COMPLETION", "COST")
_SUMS: Final = ("REQUESTS", "FAILED", *_COUNTS)
_REQUEST_HEADINGS: Final = ("REQUEST", "TIME", "TENANT", "KEY", "MODEL", "OUTCOME", *_COUNTS)


def _slice_to_row(each: UsageSlice) -> tuple[str, ...]:
    *counts, cost = each.sums
    return (
        show_time(each.span.start),
        show_time(each.span.end),
        *(value or "-" for value in each.values.values()),
        *map(str, counts),
        show_dollars(cost),
    )


def _record_to_row(record: UsageRecord) -> tuple[str, ...]:
    return (
        record.request_id,
        show_time(to_time(record.created_ms)),
        record.tenant_id,
        record.credential_id,
        record.model,
        record.outcome,
        str(record.prompt_tokens),
        str(record.cached_tokens),
        str(record.completion_tokens),
        show_dollars(record.cost_micros),
    )


def _print_report(report: ReconcileReport) -> None:
    if report.differences:
        headings = ("TENANT", "SUBJECT", "NUMBER", "REDIS", "LEDGER")
        rows = [tuple(map(str, asdict(each).values())) for each in report.differences]
        print_table(headings, rows)
    for number, what in (
        (report.compared_accounts, "holders of limits were compared"),
        (report.busy_accounts, "holders changed too often to be compared"),
        (len(report.differences), "counters were wrong and will be derived again"),
        (report.corrected_reservations, "holders had wrong reserved amounts"),
        (report.forgotten_requests, "concurrent requests had no reservation"),
        (len(report.wrong_hours), "hours had wrong sums, which will be computed again"),
    ):
        click.echo(f"{number:6} {what}.")


def _filtered(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of a filter and of a time range."""
    return reduce(lambda decorated, option: option(decorated), reversed(_FILTERS), command)


@click.group("usage", epilog=EPILOG)
def command() -> None:
    """Show, list, export and reconcile usage."""


@command.command()
@_filtered
@click.option(
    "--bucket",
    type=click.Choice(list(Bucket), case_sensitive=False),
    default=Bucket.DAY,
    show_default=True,
    help="Length of the period of each sum.",
)
@click.option(
    "--group-by",
    multiple=True,
    help=f"Dimensions to group by: any of {', '.join(Dimension)}; repeated or comma-separated.",
)
@limit_option
@json_option
@with_database
async def show(
    stores: Stores,
    *,
    start: str | None,
    end: str | None,
    bucket: Bucket,
    group_by: Sequence[str],
    limit: int,
    as_json: bool,
    **filters: str | None,
) -> None:
    """Sum up requests, tokens and cost."""
    asked = ReportRequest(
        wanted=UsageFilter(**filters),
        span=read_span(start, end, bucket=bucket),
        bucket=bucket,
        dimensions=read_dimensions(group_by, tuple(Dimension)),
    )
    report = await UsageService(stores.database).report(asked, after=None, limit=limit)
    if as_json:
        print_json([usage_fields(each) for each in report.slices])
        return
    headings = ("FROM", "TO", *(name.upper() for name in asked.dimensions))
    print_table((*headings, *_SUMS), [_slice_to_row(each) for each in report.slices])
    if report.next is not None:
        click.echo(f"Only the first {limit} lines are shown; see --limit.", err=True)


@command.command("requests")
@_filtered
@limit_option
@prints(table(_REQUEST_HEADINGS, _record_to_row), receipt_fields)
@with_database
async def list_requests(
    stores: Stores,
    *,
    start: str | None,
    end: str | None,
    limit: int,
    **filters: str | None,
) -> list[UsageRecord]:
    """List single requests, newest first."""
    page = await UsageService(stores.database).requests(
        UsageFilter(**filters), read_span(start, end), before=None, limit=limit
    )
    return page.entries


@command.command()
@click.option("--tenant", required=True, help="Id of the tenant.")
@click.option("--month", required=True, help="A UTC month, such as 2026-11.")
@click.option(
    "--output",
    type=click.File("w", encoding="utf-8", atomic=True),
    default="-",
    help="Output file.  [default: standard output]",
)
@with_database
async def export(stores: Stores, *, tenant: str, month: str, output: TextIO) -> None:
    """Export all requests of a tenant in a month as CSV, newest first."""
    span = read_month(month)
    await TenantService(stores.database, stores.announcer).get(tenant)
    records = UsageService(stores.database).export(UsageFilter(tenant_id=tenant), span)
    number = await _write(records, output)
    click.echo(f"Requests: {number}.", err=True)


@command.command("reconcile")
@click.option(
    "--days",
    type=click.IntRange(1, MAX_DAYS),
    default=ROLLUP_DAYS,
    show_default=True,
    help="Days whose sums are compared with the ledger, today included.",
)
@prints(_print_report, lambda report: asdict(report) | {"is_clean": report.is_clean})
@database_option
@redis_option
@runs_async
async def reconcile_all(
    *, days: int, database_url: str | None, redis_url: str | None
) -> ReconcileReport:
    """Write pending usage records to the ledger; then find and repair differences.

    The command compares the counters of limits in Redis with the ledger, and the ledger's sums with
    its rows.
    """
    settings = command_settings(database_url=database_url, redis_url=redis_url)
    async with open_ledger(settings) as (redis, database):
        with converting_errors(redis):
            await require_current_schema(database)
            await Drain(redis, database).run()
            return await reconcile(redis, database, rollup_days=days)


async def _write(pages: AsyncIterator[Sequence[UsageRecord]], file: TextIO) -> int:
    file.write(to_csv(RECEIPT_COLUMNS, ()))
    number = 0
    async for records in pages:
        file.write(to_csv(None, map(receipt_row, records)))
        number += len(records)
    return number
