"""`sluice usage` and `audit`."""

import csv
import io
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import click
import msgspec

from gateway.billing.usage.parts import Dimension
from gateway.cli.calls import Calls, prints, runs_async
from gateway.cli.client import AdminClient
from gateway.cli.terminal import (
    DATABASE,
    JSON,
    REDIS,
    Entity,
    columns,
    option,
    print_columns,
    print_table,
    show_time,
)
from gateway.records.errors import must

USAGE_PAGE: Final = 1000
MAX_SHOWN: Final = 10_000
MAX_DAYS: Final = 4_000
SHOWN_DETAILS: Final = 80

# These are tables: a row is a command or an option.
# fmt: off
_COUNTS: Final = ("PROMPT=prompt_tokens CACHED=cached_tokens COMPLETION=completion_tokens "
                  "AUDIO=audio_seconds COST=cost_micros")
usage = Calls(
    "usage", "gateway.accounts.tenants.routes gateway.billing.usage.routes", "/admin/usage/",
    f"REQUEST=id TIME=created_at TENANT=tenant KEY=key MODEL=model OUTCOME=outcome {_COUNTS}", "",
    """\
  sluice usage show --tenant acme --group-by model
  sluice usage show --bucket month --start 2026-01-01 --group-by tenant
  sluice usage requests --tenant acme --limit 20
  sluice usage export --tenant acme --month 2026-11 --output .    writes acme-2026-11.csv
  sluice usage reconcile
""")


def _limit(default: int) -> click.Option:
    return option("--limit", "Maximum number of lines.", type=click.IntRange(1, MAX_SHOWN),
                  default=default, show_default=True)


_MONTH: Final = re.compile(r"([0-9]{4})-(0[1-9]|1[0-2])")


def _print_report(slices: Sequence[Entity]) -> None:
    asked = ",".join(click.get_current_context().params["group_by"]).split(",")
    names = {name.strip() for name in asked}
    groups = " ".join(f"{each.value.upper()}={each.value}" for each in Dimension if each in names)
    sums = f"REQUESTS=requests FAILED=failed_requests {_COUNTS}"
    times = {name: lambda each, name=name: show_time(each[name]) for name in ("start", "end")}
    print_columns(columns(f"FROM=start TO=end {groups} {sums}", **times), slices)


usage.add(
    "show", _print_report, _limit(100), call="GET",
    note=lambda page, slices: f"Only the first {len(slices)} lines are shown; see --limit."
    if page["has_more"] else None)
usage.add("requests", None, _limit(100), call="GET /requests")


async def _export(client: AdminClient, *, tenant: str, month: str, output: str | None) -> None:
    if (read := _MONTH.fullmatch(month)) is None:
        raise must("month", "be a month such as 2026-11", month)
    year, number = map(int, read.groups())
    end = f"{year + number // 12}-{number % 12 + 1:02}-01"
    asked = {"tenant": tenant, "start": f"{month}-01", "end": end, "format": "csv"}
    await client.send("GET /admin/tenants/{tenant}", {"tenant": tenant})
    name = _file_name(output or ("." if sys.stdout.isatty() else "-"), f"{tenant}-{month}.csv")
    try:
        with click.open_file(name, "w", encoding="utf-8", atomic=name != "-") as file:
            rows = await _write_requests(client, asked, csv.writer(file))
    except OSError as error:
        reason = f"{name} cannot be written ({error.strerror})"
        raise click.ClickException(f"--output: {reason}.") from None
    click.echo(f"Requests: {rows}{'' if name == '-' else f', in {name}'}.", err=True)


def _file_name(path: str, default: str) -> str:
    """Return the path, or that of a file in it if it is a folder."""
    return str(Path(path, default)) if Path(path).is_dir() else path


async def _write_requests(client: AdminClient, asked: Mapping[str, str], writer: Any) -> int:
    """Write the requests of a tenant, and return how many there are."""
    tenant, rows, after = asked["tenant"], 0, None
    while True:
        page = {**asked, "limit": USAGE_PAGE, "after": after}
        response = await client.fetch("GET /admin/usage/requests", page)
        heading, *found = csv.reader(io.StringIO(response.text, newline=""))
        at = heading.index("project")
        if after is None:
            writer.writerow([*heading[:at], "tenant", *heading[at:]])
        writer.writerows([*row[:at], tenant, *row[at:]] for row in found)
        rows += len(found)
        if (after := response.headers.get("x-next-page")) is None:
            return rows


usage.add_call(
    "export", _export, "",
    "Export all requests of a tenant in a month as CSV, newest first.",
    option("--tenant", "Id of the tenant.", required=True),
    option("--month", "A UTC month, such as 2026-11.", required=True),
    option("--output FILE", "Output file, or folder of the file TENANT-MONTH.csv; -: standard "
           "output.  [default: the current folder, or standard output if that is no terminal]"))


def _print_differences(report: dict[str, Any]) -> None:
    if report["differences"]:
        headings = ("TENANT", "SUBJECT", "NUMBER", "REDIS", "LEDGER")
        print_table(headings, [tuple(map(str, each.values())) for each in report["differences"]])
    for number, what in (
        (report["compared_accounts"], "holders of limits were compared"),
        (report["busy_accounts"], "holders changed too often to be compared"),
        (len(report["differences"]), "counters were wrong and will be derived again"),
        (report["corrected_reservations"], "holders had wrong reserved amounts"),
        (report["forgotten_requests"], "concurrent requests had no reservation"),
        (len(report["wrong_hours"]), "hours had wrong sums, which will be computed again"),
        (len(report["wrong_balances"]), "tenants had wrong sums of prepaid usage; now correct"),
    ):
        click.echo(f"{number:6} {what}.")


@usage.command("reconcile", params=[
    option("--days", "Days whose sums are compared with the ledger, today included.", default=3,
           type=click.IntRange(1, MAX_DAYS), show_default=True),
    DATABASE, REDIS, JSON])
@prints(_print_differences)
@runs_async
async def _reconcile(**options: Any) -> dict[str, Any]:
    """Write pending usage records to the ledger; then find and repair differences.

    The command compares the counters of limits in Redis with the ledger, and the ledger's sums with
    its rows.
    """
    from gateway.cli.direct import reconciled

    return await reconciled(**options)


def _details(entry: Entity) -> str:
    text = msgspec.json.encode(entry["details"]).decode()
    return text if len(text) <= SHOWN_DETAILS else f"{text[: SHOWN_DETAILS - 3]}..."


audit = Calls(
    "audit", "gateway.accounts.audit.routes", "/admin/audit/",
    "NO=sequence TIME=time ACTOR=actor ACTION=action TENANT=tenant SUBJECT=subject DETAILS=details",
    "",
    """\
  sluice audit list --tenant acme
  sluice audit list --action key.revoke --limit 100 --json
  sluice audit verify --expect 3f5a...
  sluice audit verify --heads /var/log/sluice/audit-heads
""",
    time=lambda entry: show_time(entry["at"]), details=_details)
audit.add("list", None, _limit(50),
          option("--before after", "Only entries before this sequence number.",
                 type=click.IntRange(min=1)))


@audit.command("verify", params=[
    option("--expect expected_hash HASH", "A previously printed head. Fails unless the log still "
           "contains it."),
    option("--heads heads_file FILE", "Heads stored by SLUICE_AUDIT_SINK, such as the log of "
           "`sluice jobs`. Fails unless the audit log contains all of them.",
           type=click.File(errors="replace")),
    DATABASE, JSON])
@runs_async
async def _verify(**options: Any) -> None:
    """Verify every entry from the first; exit code 1 if one was changed or is missing.

    Exit code 1 also if the triggers that protect the audit log, ledger, credits and prices from
    changes are missing or disabled.

    With SLUICE_AUDIT_KEY in the environment, the command also verifies the signatures among the
    entries. A signature proves that nobody with only database access has recomputed all hashes. To
    detect a truncated end, pass heads that are stored elsewhere with --heads, or a printed head
    with --expect.
    """
    from gateway.cli.direct import verify

    await verify(**options)
