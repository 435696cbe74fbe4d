"""`sluice requests`: what waits and runs now."""

from typing import Final

import click

from gateway.management.live.schemas import LiveRequestBody
from gateway.management.live.service import LivePage, LiveRequest, LiveRequests
from gateway.redis_client import MeasuredConnection, converting_errors
from gateway.terminal.entities import prints, table
from gateway.terminal.options import Stores, with_stores

EPILOG = """\
\b
Examples:
  sluice requests list acme
  sluice requests cancel acme cmpl-0123456789abcdef0123456789abcdef
"""

DEFAULT_LIMIT: Final = 100
MAX_LIMIT: Final = 1000


def _to_row(live: LiveRequest) -> tuple[str, ...]:
    record = live.record
    return (
        record.request_id,
        record.full_model,
        record.credential_id,
        live.state,
        f"{live.age_ms / 1000:.1f}",
        str(live.completion_tokens),
        " ".join(live.workers) or "-",
        record.gateway,
    )


@click.group("requests", epilog=EPILOG)
def command() -> None:
    """List and cancel the requests of a tenant that wait or run now."""


@command.command("list")
@click.argument("tenant")
@click.option(
    "--limit",
    type=click.IntRange(1, MAX_LIMIT),
    default=DEFAULT_LIMIT,
    show_default=True,
    help="Most requests to list.",
)
@prints(
    table(("ID", "MODEL", "KEY", "STATE", "SECONDS", "TOKENS OUT", "WORKER", "GATEWAY"), _to_row),
    LiveRequestBody.of,
)
@with_stores
async def list_requests(stores: Stores, tenant: str, *, limit: int) -> list[LiveRequest]:
    """List the oldest live requests of TENANT (its id)."""
    page: LivePage
    executor = MeasuredConnection(stores.redis)
    try:
        with converting_errors(stores.redis):
            page = await LiveRequests(stores.database, executor).page(
                tenant, after=None, limit=limit
            )
    finally:
        await executor.aclose()
    if page.total > len(page.entries):
        click.echo(f"These are the oldest {len(page.entries)} of {page.total}.", err=True)
    return page.entries


@command.command()
@click.argument("tenant")
@click.argument("request")
@with_stores
async def cancel(stores: Stores, tenant: str, request: str) -> None:
    """Cancel REQUEST (its id) of TENANT; the tenant pays for the work so far."""
    executor = MeasuredConnection(stores.redis)
    try:
        with converting_errors(stores.redis):
            has_ended = await LiveRequests(stores.database, executor).cancel(
                tenant, request, actor=stores.actor
            )
    finally:
        await executor.aclose()
    if has_ended:
        click.echo(f"{request} is cancelled.")
    else:
        click.echo(f"{request} has not ended within five seconds: its gateway does not react.")
