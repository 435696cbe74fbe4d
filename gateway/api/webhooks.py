"""`/v1/webhooks`: where the caller's tenant is told of its budgets."""

from typing import Annotated

from fastapi import APIRouter, Path

from gateway.accounts.secret_box import SecretBox
from gateway.accounts.webhook_service import WebhookService
from gateway.api.bounded_route import BoundedRoute
from gateway.api.call import CanManageWebhooks, Context
from gateway.api.context import ProcessContext
from gateway.api.webhook_bodies import (
    CreatedWebhookBody,
    RemovedWebhook,
    SentEventBody,
    WebhookCreation,
    WebhookList,
)

router = APIRouter(prefix="/v1/webhooks", tags=["Webhooks"], route_class=BoundedRoute)

WebhookId = Annotated[str, Path(max_length=63, description="Id of the webhook.")]


@router.get("", summary="List your webhooks")
async def list_webhooks(context: Context, principal: CanManageWebhooks) -> WebhookList:
    """Oldest first, without their secrets. Needs the scope `keys`, and a credential of the whole account, like all of this."""
    return WebhookList.of(await webhook_service(context).list_of_tenant(principal.tenant_id))


@router.post("", summary="Register a webhook")
async def create_webhook(
    context: Context, principal: CanManageWebhooks, body: WebhookCreation
) -> CreatedWebhookBody:
    """Its URL is told when the budget of your tenant, of a project or of a key reaches a threshold.

    The answer shows the secret that signs what is sent; it is not shown again. At most five webhooks.
    """
    webhook = await webhook_service(context).create(
        principal.tenant_id, body.url, thresholds=body.thresholds, actor=principal.actor
    )
    return CreatedWebhookBody.of_created(webhook)


@router.delete("/{webhook_id}", summary="Remove a webhook")
async def remove_webhook(
    context: Context, principal: CanManageWebhooks, webhook_id: WebhookId
) -> RemovedWebhook:
    """It is told nothing any more, not even what is on its way to be told."""
    await webhook_service(context).remove(principal.tenant_id, webhook_id, actor=principal.actor)
    return RemovedWebhook(id=webhook_id)


@router.post("/{webhook_id}:test", summary="Try a webhook")
async def try_webhook(
    context: Context, principal: CanManageWebhooks, webhook_id: WebhookId
) -> SentEventBody:
    """Has the event `webhook.test` sent within seconds; once a minute at most."""
    return SentEventBody.of(await webhook_service(context).test(principal.tenant_id, webhook_id))


def webhook_service(context: ProcessContext) -> WebhookService:
    """Return the rules of webhooks, as the process is set up."""
    settings = context.settings
    return WebhookService(
        context.database,
        SecretBox(settings.plain_encryption_keys()),
        allows_private=settings.webhook_allow_private,
    )
