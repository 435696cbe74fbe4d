"""`/admin/tenants/{tenant_id}/webhooks`: who is told of a tenant's budgets."""

from fastapi import APIRouter

from gateway.api.admin.tenants import TenantId
from gateway.api.bounded_route import BoundedRoute
from gateway.api.call import CanAdminister, CanSeeEverything, Context
from gateway.api.webhook_bodies import (
    CreatedWebhookBody,
    RemovedWebhook,
    SentEventBody,
    WebhookCreation,
    WebhookList,
)
from gateway.api.webhooks import WebhookId, webhook_service

router = APIRouter(
    prefix="/tenants/{tenant_id}/webhooks", tags=["Webhooks"], route_class=BoundedRoute
)


@router.get("", summary="List a tenant's webhooks")
async def list_webhooks(
    context: Context, _principal: CanSeeEverything, tenant_id: TenantId
) -> WebhookList:
    """Oldest first, without their secrets."""
    return WebhookList.of(await webhook_service(context).list_of_tenant(tenant_id))


@router.post("", summary="Register a webhook for a tenant")
async def create_webhook(
    context: Context, principal: CanAdminister, tenant_id: TenantId, body: WebhookCreation
) -> CreatedWebhookBody:
    """The answer shows the secret that signs what is sent; it is not shown again."""
    webhook = await webhook_service(context).create(
        tenant_id, body.url, thresholds=body.thresholds, actor=principal.actor
    )
    return CreatedWebhookBody.of_created(webhook)


@router.delete("/{webhook_id}", summary="Remove a tenant's webhook")
async def remove_webhook(
    context: Context, principal: CanAdminister, tenant_id: TenantId, webhook_id: WebhookId
) -> RemovedWebhook:
    """It is told nothing any more, not even what is on its way to be told."""
    await webhook_service(context).remove(tenant_id, webhook_id, actor=principal.actor)
    return RemovedWebhook(id=webhook_id)


@router.post("/{webhook_id}:test", summary="Try a tenant's webhook")
async def try_webhook(
    context: Context, _principal: CanAdminister, tenant_id: TenantId, webhook_id: WebhookId
) -> SentEventBody:
    """Has the event `webhook.test` sent within seconds; once a minute at most."""
    return SentEventBody.of(await webhook_service(context).test(tenant_id, webhook_id))
