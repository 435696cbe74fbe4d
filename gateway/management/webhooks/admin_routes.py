"""Webhooks for budget events of a tenant: `/admin/tenants/{tenant_id}/webhooks`."""

from fastapi import APIRouter

from gateway.http.authorization import CanAdminister, CanSeeEverything, Context
from gateway.http.bounded_route import BoundedRoute
from gateway.management.tenants.admin_routes import TenantId
from gateway.management.webhooks.routes import WebhookId, webhook_service
from gateway.management.webhooks.schemas import (
    CreatedWebhookBody,
    RemovedWebhook,
    SentEventBody,
    WebhookCreation,
    WebhookList,
)

router = APIRouter(
    prefix="/tenants/{tenant_id}/webhooks", tags=["Webhooks"], route_class=BoundedRoute
)


@router.get("", summary="List a tenant's webhooks")
async def list_webhooks(
    context: Context, _principal: CanSeeEverything, tenant_id: TenantId
) -> WebhookList:
    """List webhooks, oldest first, without their secrets."""
    return WebhookList.of(await webhook_service(context).list_of_tenant(tenant_id))


@router.post("", summary="Register a webhook for a tenant")
async def create_webhook(
    context: Context, principal: CanAdminister, tenant_id: TenantId, body: WebhookCreation
) -> CreatedWebhookBody:
    """Create a webhook. Only this response contains the secret that signs its events."""
    webhook = await webhook_service(context).create(
        tenant_id, body.url, thresholds=body.thresholds, actor=principal.actor
    )
    return CreatedWebhookBody.of_created(webhook)


@router.delete("/{webhook_id}", summary="Remove a tenant's webhook")
async def remove_webhook(
    context: Context, principal: CanAdminister, tenant_id: TenantId, webhook_id: WebhookId
) -> RemovedWebhook:
    """Remove the webhook. It receives no more events, not even pending ones."""
    await webhook_service(context).remove(tenant_id, webhook_id, actor=principal.actor)
    return RemovedWebhook(id=webhook_id)


@router.post("/{webhook_id}:test", summary="Test a tenant's webhook")
async def try_webhook(
    context: Context, _principal: CanAdminister, tenant_id: TenantId, webhook_id: WebhookId
) -> SentEventBody:
    """Send the event `webhook.test` within seconds, at most once a minute."""
    return SentEventBody.of(await webhook_service(context).test(tenant_id, webhook_id))
