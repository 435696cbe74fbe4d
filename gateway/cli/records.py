"""`sluice webhooks`, `files`, `batches`, `usage` and `audit`: what tenants keep, and records."""

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
from gateway.cli.calls import PAGE, Calls, prints, runs_async, secret_of
from gateway.cli.client import AdminClient
from gateway.cli.terminal import (
    DATABASE,
    JSON,
    REDIS,
    Entity,
    columns,
    option,
    print_columns,
    print_fields,
    print_table,
    show_time,
)
from gateway.records.errors import must

USAGE_PAGE: Final = 1000
MAX_SHOWN: Final = 10_000
MAX_DAYS: Final = 4_000

# These are tables: a row is a command or an option.
# fmt: off
webhooks = Calls(
    "webhooks", "gateway.accounts.webhooks.routes",
    "Register, list, test and remove a tenant's webhooks.",
    """\
  sluice webhooks create --tenant acme https://example.com/hooks
  sluice webhooks create --tenant acme https://example.com/hooks --threshold 90 --threshold 100
  sluice webhooks list --tenant acme
  sluice webhooks test --tenant acme whk_0123456789abcdef
  sluice webhooks remove --tenant acme whk_0123456789abcdef
""")
_WEBHOOKS: Final = "/admin/tenants/{tenant}/webhooks"
webhooks.add(
    "create --tenant URL", f"POST {_WEBHOOKS}",
    secret_of("secret", "This is the secret of the webhook {id} of tenant {tenant_id}."),
    "Send events about budgets of a tenant to URL; print the secret that signs them.",
    option("--threshold thresholds", "Percentage of a budget at which an event is sent; "
           "repeatable.  [default: 50, 80, 100]", type=int, multiple=True))
webhooks.add("list --tenant", f"GET {_WEBHOOKS}",
             columns("ID=id URL=url THRESHOLDS=thresholds CREATED=created_at"),
             "List the webhooks of a tenant.")
webhooks.add("test --tenant WEBHOOK", f"POST {_WEBHOOKS}/{{webhook}}:test",
             "The event {id} will be sent within seconds.",
             "Send a test event to WEBHOOK (its id).")
webhooks.add("remove --tenant WEBHOOK", f"DELETE {_WEBHOOKS}/{{webhook}}", "Removed {webhook}.",
             "Remove WEBHOOK (its id): it receives no further events.")

files = Calls(
    "files", "gateway.batches.files.routes", "List and delete a tenant's files.",
    """\
  sluice files list --tenant acme
  sluice files delete --tenant acme file-0123456789abcdef0123456789abcdef
""")
_FILES: Final = "/admin/tenants/{tenant}/files"
files.add(
    "list --tenant", f"GET {_FILES}",
    columns("ID=id NAME=filename PURPOSE=purpose BYTES=bytes LINES=lines EXPIRES=expires_at:-"),
    "List the newest files of a tenant.",
    option("--after ID", "Id of the last file of the previous page."), pages=PAGE)
files.add("delete --tenant FILE", f"DELETE {_FILES}/{{file}}", "Deleted {file}.",
          "Delete FILE (its id) with its content, unless a batch still uses it.")

batches = Calls(
    "batches", "gateway.batches.routes", "List, show and cancel a tenant's batches.",
    """\
  sluice batches list --tenant acme
  sluice batches show --tenant acme batch_0123456789abcdef0123456789abcdef
  sluice batches cancel --tenant acme batch_0123456789abcdef0123456789abcdef
""")
_BATCHES: Final = "/admin/tenants/{tenant}/batches"
batches.add(
    "list --tenant", f"GET {_BATCHES}",
    columns("ID=id STATUS=status COMPLETED=completed FAILED=failed CREATED=created_at "
            "DEADLINE=expires_at",
            completed=lambda batch: "{completed}/{total}".format_map(batch["request_counts"]),
            failed=lambda batch: batch["request_counts"]["failed"]),
    "List the newest batches of a tenant.",
    option("--after ID", "Id of the last batch of the previous page."), pages=PAGE)
batches.add("show --tenant BATCH", f"GET {_BATCHES}/{{batch}}", print_fields,
            "Show the progress of BATCH (its id).")
batches.add("cancel --tenant BATCH", f"POST {_BATCHES}/{{batch}}/cancel", "{batch} is {status}.",
            "Cancel BATCH (its id); lines that have ended stay in its result files.")

usage = Calls(
    "usage", "gateway.accounts.tenants.routes gateway.billing.usage.routes",
    "Show, list, export and reconcile usage.",
    """\
  sluice usage show --tenant acme --group-by model
  sluice usage show --bucket month --start 2026-01-01 --group-by tenant
  sluice usage requests --tenant acme --limit 20
  sluice usage export --tenant acme --month 2026-11           writes acme-2026-11.csv
  sluice usage reconcile
""")
_FILTERS: Final = (
    option("--tenant", "Only this tenant."),
    option("--project", "Only this project, by its id."),
    option("--key", "Only this key, by its id, or jwt:SUBJECT."),
    option("--model", "Only this model."),
    option("--start", "A date or time in UTC.  [default: 30 days before the end]"),
    option("--end", "A date or time in UTC, exclusive.  [default: now]"),
)
_LIMIT: Final = option("--limit", "Maximum number of lines.", type=click.IntRange(1, MAX_SHOWN),
                       default=100, show_default=True)
_COUNTS: Final = ("PROMPT=prompt_tokens CACHED=cached_tokens COMPLETION=completion_tokens "
                  "AUDIO=audio_seconds COST=cost_micros")
_MONTH: Final = re.compile(r"([0-9]{4})-(0[1-9]|1[0-2])")


def _print_report(slices: Sequence[Entity]) -> None:
    asked = ",".join(click.get_current_context().params["group_by"]).split(",")
    names = {name.strip() for name in asked}
    groups = " ".join(f"{each.value.upper()}={each.value}" for each in Dimension if each in names)
    sums = f"REQUESTS=requests FAILED=failed_requests {_COUNTS}"
    times = {name: lambda each, name=name: show_time(each[name]) for name in ("start", "end")}
    print_columns(columns(f"FROM=start TO=end {groups} {sums}", **times), slices)


usage.add(
    "show", "GET /admin/usage", _print_report, "Sum up requests, tokens and cost.", *_FILTERS,
    option("--bucket", "Length of the period of each sum.", default="day", show_default=True,
           type=click.Choice(("hour", "day", "month", "total"), case_sensitive=False)),
    option("--group-by", f"Dimensions to group by: any of {', '.join(Dimension)}; repeated or "
           "comma-separated.", multiple=True),
    _LIMIT, pages=USAGE_PAGE,
    note=lambda page, slices: f"Only the first {len(slices)} lines are shown; see --limit."
    if page["has_more"] else None)
usage.add(
    "requests", "GET /admin/usage/requests",
    columns("REQUEST=id TIME=created_at TENANT=tenant KEY=key MODEL=model OUTCOME=outcome "
            f"{_COUNTS}"),
    "List single requests, newest first.", *_FILTERS, _LIMIT, pages=USAGE_PAGE)


async def _export(client: AdminClient, *, tenant: str, month: str, output: str | None) -> None:
    if (read := _MONTH.fullmatch(month)) is None:
        raise must("month", "be a month such as 2026-11", month)
    year, number = map(int, read.groups())
    end = f"{year + number // 12}-{number % 12 + 1:02}-01"
    asked = {"tenant": tenant, "start": f"{month}-01", "end": end, "format": "csv"}
    await client.send("GET /admin/tenants/{tenant}", {"tenant": tenant})
    name = _file_name(output or ("." if sys.stdout.isatty() else "-"), f"{tenant}-{month}.csv")
    with click.open_file(name, "w", encoding="utf-8", atomic=name != "-") as file:
        rows = await _write_requests(client, asked, csv.writer(file))
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


audit = Calls(
    "audit", "gateway.accounts.audit.routes", "List changes and verify the audit log.",
    """\
  sluice audit list --tenant acme
  sluice audit list --action key.revoke --limit 100 --json
  sluice audit verify
  sluice audit verify --expect 3f5a...
  sluice audit verify --heads /var/log/sluice/audit-heads
""")
SHOWN_DETAILS: Final = 80


def _details(entry: Entity) -> str:
    text = msgspec.json.encode(entry["details"]).decode()
    return text if len(text) <= SHOWN_DETAILS else f"{text[: SHOWN_DETAILS - 3]}..."


audit.add(
    "list", "GET /admin/audit",
    columns("NO=sequence TIME=time ACTOR=actor ACTION=action TENANT=tenant SUBJECT=subject "
            "DETAILS=details", time=lambda entry: show_time(entry["at"]), details=_details),
    "List changes, newest first.",
    option("--tenant", "Only changes of this tenant."),
    option("--actor", "Only changes by this actor, as listed."),
    option("--action", "Only this action, such as key.revoke."),
    option("--before after", "Only entries before this sequence number.",
           type=click.IntRange(min=1)),
    option("--limit", "Maximum number of entries.", type=click.IntRange(1, MAX_SHOWN), default=50,
           show_default=True),
    pages=PAGE)


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
