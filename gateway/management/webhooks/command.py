"""`sluice webhooks`: events about budgets that are nearly used up."""

from typing import Any

import click

from gateway.management.webhooks.secret_box import SecretBox
from gateway.management.webhooks.service import DEFAULT_THRESHOLDS, WebhookService
from gateway.tenancy.records import Webhook
from gateway.terminal.entities import prints, table
from gateway.terminal.options import Stores, with_database, with_stores
from gateway.terminal.output import show_time

EPILOG = """\
\b
Examples:
  sluice webhooks create acme https://example.com/hooks
  sluice webhooks create acme https://example.com/hooks --threshold 90 --threshold 100
  sluice webhooks list acme
  sluice webhooks test acme whk_0123456789abcdef
  sluice webhooks remove acme whk_0123456789abcdef
"""


def _to_row(webhook: Webhook) -> tuple[str, ...]:
    thresholds = ",".join(map(str, webhook.thresholds))
    return (webhook.id, webhook.url, thresholds, show_time(webhook.created_at))


def _print_secret(webhook: Webhook) -> None:
    click.echo(webhook.secret)
    click.echo(
        f"\nThis is the secret of the webhook {webhook.id} of tenant {webhook.tenant_id}. "
        "Store it now: it cannot be shown again.",
        err=True,
    )


def _to_json(webhook: Webhook) -> dict[str, Any]:
    return {
        "id": webhook.id,
        "tenant": webhook.tenant_id,
        "url": webhook.url,
        "thresholds": webhook.thresholds,
        "created_at": webhook.created_at,
    }


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
@prints(_print_secret, lambda webhook: {**_to_json(webhook), "secret": webhook.secret})
@with_stores
async def create(stores: Stores, tenant: str, url: str, *, thresholds: tuple[int, ...]) -> Webhook:
    """Send events about budgets of TENANT (its id) to URL; print the secret that signs them."""
    return await _service(stores).create(tenant, url, thresholds=thresholds, actor=stores.actor)


@command.command("list")
@click.argument("tenant")
@prints(table(("ID", "URL", "THRESHOLDS", "CREATED"), _to_row), _to_json)
@with_database
async def list_webhooks(stores: Stores, tenant: str) -> list[Webhook]:
    """List the webhooks of TENANT (its id)."""
    return await _service(stores).list_of_tenant(tenant)


@command.command()
@click.argument("tenant")
@click.argument("webhook")
@with_database
async def test(stores: Stores, tenant: str, webhook: str) -> None:
    """Send a test event to WEBHOOK (its id)."""
    event = await _service(stores).test(tenant, webhook)
    click.echo(f"The event {event.id} will be sent within seconds.")


@command.command()
@click.argument("tenant")
@click.argument("webhook")
@with_database
async def remove(stores: Stores, tenant: str, webhook: str) -> None:
    """Remove WEBHOOK (its id): it receives no further events."""
    await _service(stores).remove(tenant, webhook, actor=stores.actor)
    click.echo(f"Removed {webhook}.")


def _service(stores: Stores) -> WebhookService:
    return WebhookService(
        stores.database,
        SecretBox(stores.settings.plain_encryption_keys()),
        allows_private=stores.settings.webhook_allow_private,
    )
