"""`sluice audit`: list the audit log and detect tampering."""

from collections.abc import Iterator
from typing import Any, TextIO

import click
import msgspec

from gateway.management.audit.log import AuditEntry, ChainState
from gateway.management.audit.service import AuditFilter, AuditService
from gateway.management.audit.signing import HeadSigner, SignedHead
from gateway.terminal.entities import prints, table
from gateway.terminal.options import Stores, json_option, with_database
from gateway.terminal.output import print_json, show_time

MAX_SHOWN = 10_000
SHOWN_DETAILS = 80

EPILOG = """\
\b
Examples:
  sluice audit list --tenant acme
  sluice audit list --action key.revoke --limit 100 --json
  sluice audit verify
  sluice audit verify --expect 3f5a...
  sluice audit verify --heads /var/log/sluice/audit-heads
"""


def _to_row(entry: AuditEntry) -> tuple[str, ...]:
    details = msgspec.json.encode(entry.details).decode()
    return (
        str(entry.sequence),
        show_time(entry.at),
        entry.actor,
        entry.action,
        entry.tenant_id or "-",
        entry.subject,
        details if len(details) <= SHOWN_DETAILS else f"{details[: SHOWN_DETAILS - 3]}...",
    )


def _to_json(entry: AuditEntry) -> dict[str, Any]:
    return {
        "sequence": entry.sequence,
        "at": entry.at,
        "actor": entry.actor,
        "action": entry.action,
        "tenant": entry.tenant_id,
        "subject": entry.subject,
        "details": entry.details,
        "hash": entry.hash,
    }


_HEADINGS = ("NO", "TIME", "ACTOR", "ACTION", "TENANT", "SUBJECT", "DETAILS")


@click.group("audit", epilog=EPILOG)
def command() -> None:
    """List changes and verify the audit log."""


@command.command("list")
@click.option("--tenant", help="Only changes of this tenant.")
@click.option("--actor", help="Only changes by this actor, as listed.")
@click.option("--action", help="Only this action, such as key.revoke.")
@click.option(
    "--before", type=click.IntRange(min=1), help="Only entries before this sequence number."
)
@click.option(
    "--limit",
    type=click.IntRange(1, MAX_SHOWN),
    default=50,
    show_default=True,
    help="Maximum number of entries.",
)
@prints(table(_HEADINGS, _to_row), _to_json)
@with_database
async def list_entries(
    stores: Stores,
    *,
    tenant: str | None,
    actor: str | None,
    action: str | None,
    before: int | None,
    limit: int,
) -> list[AuditEntry]:
    """List changes, newest first."""
    wanted = AuditFilter(tenant_id=tenant, actor=actor, action=action)
    page = await AuditService(stores.database).page(wanted, before=before, limit=limit)
    return page.entries


@command.command()
@click.option(
    "--expect",
    "expected_hash",
    metavar="HASH",
    help="A previously printed head. Fails unless the log still contains it.",
)
@click.option(
    "--heads",
    "heads_file",
    type=click.File(errors="replace"),
    metavar="FILE",
    help="Heads stored by SLUICE_AUDIT_SINK, such as the log of `sluice jobs`. Fails unless the "
    "audit log contains all of them.",
)
@json_option
@with_database
async def verify(
    stores: Stores,
    *,
    expected_hash: str | None,
    heads_file: TextIO | None,
    as_json: bool,
) -> None:
    """Verify every entry from the first; exit code 1 if one was changed or is missing.

    Exit code 1 also if the triggers that protect the audit log, ledger, credits and prices from
    changes are missing or disabled.

    With SLUICE_AUDIT_KEY in the environment, the command also verifies the signatures among the
    entries. A signature proves that nobody with only database access has recomputed all hashes. To
    detect a truncated end, pass heads that are stored elsewhere with --heads, or a printed head
    with --expect.
    """
    expected = None if expected_hash is None else expected_hash.strip().lower()
    keys = stores.settings.audit_keys
    if heads_file is not None and not keys:
        raise click.UsageError("--heads requires SLUICE_AUDIT_KEY, the key that signed the heads.")
    noted = [] if heads_file is None else SignedHead.all_in(heads_file.read())
    if heads_file is not None and not noted:
        raise click.UsageError(f"--heads: {heads_file.name} contains no signed head.")
    state = await AuditService(stores.database).verify(
        expected_hash=expected, signer=HeadSigner(keys) if keys else None, noted=noted
    )
    if as_json:
        print_json(state)
    if faults := " ".join(_faults(state)):
        raise click.ClickException(faults)
    if not as_json:
        signed = "" if state.signed is None else f" {state.signed} of them signed,"
        click.echo(f"The audit log is intact: {state.entries} entries,{signed} head {state.head}.")


def _faults(state: ChainState) -> Iterator[str]:
    size = f"It has {state.entries} entries and the head {state.head}."
    if state.broken_at is not None:
        yield f"The audit log was tampered with: {state.reason}. Intact up to row {state.entries}."
    if not state.has_expected:
        yield f"The audit log was truncated: no entry has the expected hash. {size}"
    if state.lost_head is not None:
        yield (
            f"The audit log was truncated or recreated: entry {state.lost_head} does not match its "
            f"stored head, or that head is not genuine. {size}"
        )
    if state.signed == 0 and state.entries:
        yield (
            f"None of the {state.entries} entries of the audit log is signed. `sluice jobs` signs "
            "every minute if SLUICE_AUDIT_KEY is set; any earlier signatures were removed."
        )
    if state.unprotected:
        yield (
            f"Rows can be changed in {', '.join(state.unprotected)}: triggers that reject changes "
            "are missing, disabled or redefined. Compare these tables with a backup."
        )
