"""Webhooks for budget events of a tenant.

Tenants have these routes at `/v1/webhooks`, operators at `/admin/tenants/{tenant_id}/webhooks`.
"""

from typing import Annotated

from fastapi import APIRouter, Path

from gateway.accounts.shared.callers import CallerOfTenant, own_tenant
from gateway.accounts.shared.parameters import PageSize
from gateway.accounts.webhooks.schemas import (
    CreatedWebhookBody,
    EventStateList,
    RemovedWebhook,
    SentEventBody,
    WebhookCreation,
    WebhookList,
)
from gateway.accounts.webhooks.service import WebhookService
from gateway.http.bounded_route import BoundedRoute
from gateway.http.services import made
from gateway.platform.database.paging import Page
from gateway.records.scopes import Scope

router = APIRouter(prefix="/webhooks", tags=["Webhooks"], route_class=BoundedRoute)
authorize_tenant = own_tenant(Scope.KEYS, of_tenant=True)

Webhooks = Annotated[WebhookService, made(WebhookService.of)]
WebhookId = Annotated[str, Path(max_length=63, description="Id of the webhook.")]


@router.get("", summary="List webhooks")
async def list_webhooks(webhooks: Webhooks, caller: CallerOfTenant) -> WebhookList:
    """List webhooks, oldest first, without their secrets.

    All routes under `/v1/webhooks` need the scope `keys` and a credential of the whole account.
    """
    found = await webhooks.list_of_tenant(caller.tenant_id)
    return WebhookList.of(Page(found, has_more=False))


@router.post("", summary="Register a webhook")
async def create_webhook(
    webhooks: Webhooks, caller: CallerOfTenant, body: WebhookCreation
) -> CreatedWebhookBody:
    """Create a webhook. It gets an event when a tenant, project or key budget reaches a threshold.

    Only this response contains the secret that signs the events. A tenant can have at most five
    webhooks.
    """
    webhook = await webhooks.create(
        caller.tenant_id, body.url, thresholds=body.thresholds, actor=caller.actor
    )
    return CreatedWebhookBody.of(webhook)


@router.get("/{webhook_id}/events", summary="List the events of a webhook")
async def list_events(
    webhooks: Webhooks, caller: CallerOfTenant, webhook_id: WebhookId, limit: PageSize = 20
) -> EventStateList:
    """List the newest events, newest first, with the states of their delivery."""
    events = await webhooks.events(caller.tenant_id, webhook_id, limit=limit)
    return EventStateList.of(Page(events, has_more=False))


@router.delete("/{webhook_id}", summary="Remove a webhook")
async def remove_webhook(
    webhooks: Webhooks, caller: CallerOfTenant, webhook_id: WebhookId
) -> RemovedWebhook:
    """Remove the webhook. It receives no more events, not even pending ones."""
    await webhooks.remove(caller.tenant_id, webhook_id, actor=caller.actor)
    return RemovedWebhook(id=webhook_id)


@router.post("/{webhook_id}:test", summary="Test a webhook")
async def try_webhook(
    webhooks: Webhooks, caller: CallerOfTenant, webhook_id: WebhookId
) -> SentEventBody:
    """Send the event `webhook.test` within seconds, at most once a minute."""
    return SentEventBody.of(await webhooks.test(caller.tenant_id, webhook_id))
