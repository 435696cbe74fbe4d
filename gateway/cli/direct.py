"""Work of commands that the Admin API does not do: it needs the database or local files."""

from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import asdict
from typing import Any, TextIO

import click

from gateway.accounts.audit.log import AuditService, ChainState, HeadSigner, SignedHead
from gateway.adapters.checks import InvalidAdapterError
from gateway.adapters.routes import RegisteredAdapterBody
from gateway.adapters.service import AdapterService
from gateway.billing.ledger.reconcile import reconcile
from gateway.cli.deployment import Stores, command_settings, open_stores
from gateway.cli.terminal import print_json
from gateway.jobs.schedule import JobServices
from gateway.platform.database.schema import require_current_schema
from gateway.platform.redis_client import converting_errors


async def reconciled(*, days: int, **urls: str | None) -> dict[str, Any]:
    """Drain the usage stream, and repair differences; return the report."""
    settings = command_settings(**urls)
    async with aclosing(JobServices(settings)) as services:
        with converting_errors(services.redis):
            await require_current_schema(services.database)
            await services.drain.run()
            report = await reconcile(services.redis, services.database, rollup_days=days)
    return asdict(report) | {"is_clean": report.is_clean}


async def add_adapter(stores: Stores, tenant_id: str, **details: Any) -> dict[str, Any]:
    """Register an adapter, validate and copy its files; return its body."""
    await stores.catalogue.refresh()
    service = AdapterService.of(
        stores.settings, stores.database, stores.announcer, stores.catalogue
    )
    actor = stores.authenticator.principal.actor
    try:
        added = await service.add(tenant_id, details.pop("name"), **details, actor=actor)
    except InvalidAdapterError as error:
        raise click.ClickException(str(error)) from None
    return RegisteredAdapterBody.of(added).model_dump(mode="json")


async def verify(
    *,
    expected_hash: str | None,
    heads_file: TextIO | None,
    as_json: bool,
    database_url: str | None,
) -> None:
    """Verify the audit log, and print its state. Raises ClickException about its faults."""
    async with open_stores(database_url, None) as stores:
        keys = stores.settings.audit_keys
        if heads_file is not None and not keys:
            raise click.UsageError(
                "--heads requires SLUICE_AUDIT_KEY, the key that signed the heads."
            )
        noted = [] if heads_file is None else SignedHead.all_in(heads_file.read())
        if heads_file is not None and not noted:
            raise click.UsageError(f"--heads: {heads_file.name} contains no signed head.")
        state = await AuditService(stores.database).verify(
            expected_hash=None if expected_hash is None else expected_hash.strip().lower(),
            signer=HeadSigner(keys) if keys else None,
            noted=noted,
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
