"""`sluice webhooks`: events about budgets that are nearly used up."""

from typing import Any

import click

from gateway.management.webhooks.secret_box import SecretBox
from gateway.management.webhooks.service import DEFAULT_THRESHOLDS, WebhookService
from gateway.settings import load_settings
from gateway.tenancy.records import Webhook
from gateway.terminal.options import (
    Stores,
    database_option,
    json_option,
    open_stores,
    redis_option,
    runs_async,
)
from gateway.terminal.output import print_json, print_table, show_time

EPILOG = """\
\b
Examples:
  sluice webhooks create acme https://example.com/hooks
  sluice webhooks create acme https://example.com/hooks --threshold 90 --threshold 100
  sluice webhooks list acme
  sluice webhooks test acme whk_0123456789abcdef
  sluice webhooks remove acme whk_0123456789abcdef
"""


@click.group("webhooks", epilog=EPILOG)
def command() -> None:
    """Register, list, test and remove a tenant's webhooks."""


@command.command()
@click.argument("tenant")
@click.argument("url")
@click.option(
    "--threshold",
    "thresholds",
    type=int,
    multiple=True,
    default=DEFAULT_THRESHOLDS,
    show_default=True,
    help="Percentage of a budget at which an event is sent; repeatable.",
)
@json_option
@database_option
@redis_option
@runs_async
async def create(
    tenant: str,
    url: str,
    *,
    thresholds: tuple[int, ...],
    as_json: bool,
    database_url: str | None,
    redis_url: str | None,
) -> None:
    """Send events about budgets of TENANT (its id) to URL; print the secret that signs them."""
    async with open_stores(database_url, redis_url) as stores:
        webhook = await _service(stores).create(
            tenant, url, thresholds=thresholds, actor=stores.actor
        )
    if as_json:
        print_json({**_to_json(webhook), "secret": webhook.secret})
        return
    click.echo(webhook.secret)
    click.echo(
        f"\nThis is the secret of the webhook {webhook.id} of tenant {tenant}. "
        "Store it now: it cannot be shown again.",
        err=True,
    )


@command.command("list")
@click.argument("tenant")
@json_option
@database_option
@runs_async
async def list_webhooks(tenant: str, *, as_json: bool, database_url: str | None) -> None:
    """List the webhooks of TENANT (its id)."""
    async with open_stores(database_url, None) as stores:
        webhooks = await _service(stores).list_of_tenant(tenant)
    if as_json:
        print_json([_to_json(webhook) for webhook in webhooks])
        return
    print_table(
        ("ID", "URL", "THRESHOLDS", "CREATED"),
        [
            (
                webhook.id,
                webhook.url,
                ",".join(map(str, webhook.thresholds)),
                show_time(webhook.created_at),
            )
            for webhook in webhooks
        ],
    )


@command.command()
@click.argument("tenant")
@click.argument("webhook")
@database_option
@runs_async
async def test(tenant: str, webhook: str, *, database_url: str | None) -> None:
    """Send a test event to WEBHOOK (its id)."""
    async with open_stores(database_url, None) as stores:
        event = await _service(stores).test(tenant, webhook)
    click.echo(f"The event {event.id} will be sent within seconds.")


@command.command()
@click.argument("tenant")
@click.argument("webhook")
@database_option
@runs_async
async def remove(tenant: str, webhook: str, *, database_url: str | None) -> None:
    """Remove WEBHOOK (its id): it receives no further events."""
    async with open_stores(database_url, None) as stores:
        await _service(stores).remove(tenant, webhook, actor=stores.actor)
    click.echo(f"Removed {webhook}.")


def _service(stores: Stores) -> WebhookService:
    settings = load_settings()
    return WebhookService(
        stores.database,
        SecretBox(settings.plain_encryption_keys()),
        allows_private=settings.webhook_allow_private,
    )


def _to_json(webhook: Webhook) -> dict[str, Any]:
    return {
        "id": webhook.id,
        "tenant": webhook.tenant_id,
        "url": webhook.url,
        "thresholds": webhook.thresholds,
        "created_at": webhook.created_at,
    }
