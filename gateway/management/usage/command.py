"""`sluice usage`: usage and its cost."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict
from typing import Final, TextIO

import click
from redis.exceptions import RedisError

from gateway.database.schema import require_current_schema
from gateway.errors import StoreUnavailableError
from gateway.ledger.connections import open_ledger
from gateway.ledger.drain import Drain
from gateway.ledger.reconcile import ReconcileReport, reconcile
from gateway.management.tenants.service import TenantService
from gateway.management.usage.csv_text import to_csv
from gateway.management.usage.export import RECEIPT_COLUMNS, receipt_row
from gateway.management.usage.input import read_dimensions, read_month, read_span
from gateway.management.usage.parts import Dimension, UsageFilter
from gateway.management.usage.periods import Bucket
from gateway.management.usage.schemas import receipt_fields, usage_fields
from gateway.management.usage.service import ReportRequest, UsageService, UsageSlice
from gateway.settings import load_settings
from gateway.tenancy.times import to_time
from gateway.tenancy.usage_record import UsageRecord
from gateway.terminal.money import show_dollars
from gateway.terminal.options import (
    Decorator,
    database_option,
    json_option,
    open_stores,
    redis_option,
    runs_async,
)
from gateway.terminal.output import print_json, print_table, show_time

MAX_SHOWN: Final = 10_000

EPILOG = """\
\b
Examples:
  sluice usage show --tenant acme --group-by model
  sluice usage show --bucket month --start 2026-01-01 --group-by tenant
  sluice usage requests --tenant acme --limit 20
  sluice usage export --tenant acme --month 2026-11 --output acme.csv
  sluice usage reconcile
"""

tenant_option: Decorator = click.option("--tenant", help="Only this tenant.")
project_option: Decorator = click.option("--project", help="Only this project, by its id.")
key_option: Decorator = click.option("--key", help="Only this key, by its id, or jwt:SUBJECT.")
model_option: Decorator = click.option("--model", help="Only this model.")
start_option: Decorator = click.option(
    "--start", help="A date or time in UTC.  [default: 30 days before the end]"
)
end_option: Decorator = click.option(
    "--end", help="A date or time in UTC, exclusive.  [default: now]"
)
limit_option: Decorator = click.option(
    "--limit",
    type=click.IntRange(1, MAX_SHOWN),
    default=100,
    show_default=True,
    help="Maximum number of lines.",
)


@click.group("usage", epilog=EPILOG)
def command() -> None:
    """Show, list, export and reconcile usage."""


@command.command()
@tenant_option
@project_option
@key_option
@model_option
@start_option
@end_option
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
@database_option
@runs_async
async def show(
    *,
    tenant: str | None,
    project: str | None,
    key: str | None,
    model: str | None,
    start: str | None,
    end: str | None,
    bucket: Bucket,
    group_by: Sequence[str],
    limit: int,
    as_json: bool,
    database_url: str | None,
) -> None:
    """Sum up requests, tokens and cost."""
    asked = ReportRequest(
        wanted=_wanted(tenant, project, key=key, model=model),
        span=read_span(start, end, bucket=bucket),
        bucket=bucket,
        dimensions=read_dimensions(group_by, tuple(Dimension)),
    )
    async with open_stores(database_url, None) as stores:
        report = await UsageService(stores.database).report(asked, after=None, limit=limit)
    if as_json:
        print_json([usage_fields(each) for each in report.slices])
        return
    headings = ("FROM", "TO", *(name.upper() for name in asked.dimensions))
    print_table((*headings, *_SUMS), [_slice_to_row(each) for each in report.slices])
    if report.next is not None:
        click.echo(f"Only the first {limit} lines are shown; see --limit.", err=True)


@command.command("requests")
@tenant_option
@project_option
@key_option
@model_option
@start_option
@end_option
@limit_option
@json_option
@database_option
@runs_async
async def list_requests(
    *,
    tenant: str | None,
    project: str | None,
    key: str | None,
    model: str | None,
    start: str | None,
    end: str | None,
    limit: int,
    as_json: bool,
    database_url: str | None,
) -> None:
    """List single requests, newest first."""
    wanted = _wanted(tenant, project, key=key, model=model)
    async with open_stores(database_url, None) as stores:
        page = await UsageService(stores.database).requests(
            wanted, read_span(start, end), before=None, limit=limit
        )
    if as_json:
        print_json([receipt_fields(record) for record in page.entries])
        return
    headings = ("REQUEST", "TIME", "TENANT", "KEY", "MODEL", "OUTCOME", *_COUNTS)
    print_table(headings, [_record_to_row(record) for record in page.entries])


@command.command()
@click.option("--tenant", required=True, help="Id of the tenant.")
@click.option("--month", required=True, help="A UTC month, such as 2026-11.")
@click.option(
    "--output",
    type=click.File("w", encoding="utf-8", atomic=True),
    default="-",
    help="Output file.  [default: standard output]",
)
@database_option
@runs_async
async def export(*, tenant: str, month: str, output: TextIO, database_url: str | None) -> None:
    """Export all requests of a tenant in a month as CSV, newest first."""
    span = read_month(month)
    async with open_stores(database_url, None) as stores:
        await TenantService(stores.database, stores.announcer).get(tenant)
        records = UsageService(stores.database).export(UsageFilter(tenant_id=tenant), span)
        number = await _write(records, output)
    click.echo(f"Requests: {number}.", err=True)


@command.command("reconcile")
@json_option
@database_option
@redis_option
@runs_async
async def reconcile_all(*, as_json: bool, database_url: str | None, redis_url: str | None) -> None:
    """Write pending usage records to the ledger; then find and repair differences.

    The command compares the counters of limits in Redis with the ledger, and the ledger's sums with
    its rows.
    """
    settings = load_settings(database_url=database_url, redis_url=redis_url)
    try:
        async with open_ledger(settings) as (redis, database):
            await require_current_schema(database)
            await Drain(redis, database).run()
            report = await reconcile(redis, database)
    except RedisError as error:
        raise StoreUnavailableError("Redis cannot be reached at the moment.") from error
    if as_json:
        print_json(asdict(report) | {"is_clean": report.is_clean})
    else:
        _print_report(report)


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


async def _write(pages: AsyncIterator[Sequence[UsageRecord]], file: TextIO) -> int:
    file.write(to_csv(RECEIPT_COLUMNS, ()))
    number = 0
    async for records in pages:
        file.write(to_csv(None, map(receipt_row, records)))
        number += len(records)
    return number


_COUNTS: Final = ("PROMPT", "CACHED", "COMPLETION", "COST")
_SUMS: Final = ("REQUESTS", "FAILED", *_COUNTS)


def _wanted(
    tenant: str | None, project: str | None, *, key: str | None, model: str | None
) -> UsageFilter:
    return UsageFilter(tenant_id=tenant, project_id=project, credential_id=key, model=model)


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
