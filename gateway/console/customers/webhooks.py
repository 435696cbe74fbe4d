"""Webhooks: register, test and remove, and the states of their deliveries."""

from typing import Annotated, Any, Final

from fastapi import APIRouter, Depends, Request, Response

from gateway.accounts.webhooks.routes import WebhookCreation, WebhookId, Webhooks
from gateway.console.forms import Form, checked
from gateway.console.rendering import confirmation, page
from gateway.console.routing import SentForm, TenantRoute, Visitor, needs, redirect
from gateway.records.errors import ApiError
from gateway.records.scopes import Scope

EVENTS: Final = 50
NOTICES: Final = {
    "tested": "The test event is sent within seconds. Load the page again to see its state.",
    "removed": "The webhook is removed and receives no more events.",
}

router = APIRouter(route_class=TenantRoute, prefix="/webhooks", include_in_schema=False)

ManagesWebhooks = Annotated[Visitor, Depends(needs(Scope.KEYS, whole=True))]


@router.get("")
async def list_webhooks(request: Request, webhooks: Webhooks, visitor: ManagesWebhooks) -> Response:
    """List webhooks, with the form that registers one."""
    found = await webhooks.list_of_tenant(visitor.tenant_id)
    return page(
        request,
        "webhooks.html",
        webhooks=found,
        form=Form(),
        error=None,
        notices=NOTICES,
    )


@router.post("")
async def create_webhook(
    request: Request, webhooks: Webhooks, visitor: ManagesWebhooks, form: SentForm
) -> Response:
    """Register a webhook and show its secret, once."""
    try:
        values: dict[str, Any] = {"url": form["url"]}
        if form["thresholds"]:
            numbers = form.words("thresholds")
            values["thresholds"] = [int(each) if each.isdecimal() else each for each in numbers]
        body = checked(WebhookCreation, values)
        created = await webhooks.create(
            visitor.tenant_id,
            body.url,
            thresholds=body.thresholds,
            actor=visitor.caller.actor,
        )
    except ApiError as error:
        return page(
            request,
            "webhooks.html",
            webhooks=await webhooks.list_of_tenant(visitor.tenant_id),
            form=form,
            error=error,
        )
    return page(request, "webhook_secret.html", webhook=created)


@router.get("/{webhook_id}")
async def show_webhook(
    request: Request, webhooks: Webhooks, visitor: ManagesWebhooks, webhook_id: WebhookId
) -> Response:
    """Show a webhook and its newest events."""
    return page(
        request,
        "webhook.html",
        webhook=await webhooks.get(visitor.tenant_id, webhook_id),
        events=await webhooks.events(visitor.tenant_id, webhook_id, limit=EVENTS),
        notices=NOTICES,
    )


@router.post("/{webhook_id}/test")
async def try_webhook(
    webhooks: Webhooks, visitor: ManagesWebhooks, webhook_id: WebhookId
) -> Response:
    """Send a test event."""
    await webhooks.test(visitor.tenant_id, webhook_id)
    return redirect(f"{visitor.home}/webhooks/{webhook_id}", done="tested")


@router.get("/{webhook_id}/remove")
async def ask_to_remove(
    request: Request, webhooks: Webhooks, visitor: ManagesWebhooks, webhook_id: WebhookId
) -> Response:
    """Ask for confirmation."""
    webhook = await webhooks.get(visitor.tenant_id, webhook_id)
    return confirmation(
        request,
        f"{visitor.home}/webhooks/{webhook.id}",
        "remove",
        title="Remove the webhook?",
        text=f"{webhook.url} receives no more events, not even those that wait for an attempt.",
        button="Remove the webhook",
    )


@router.post("/{webhook_id}/remove")
async def remove_webhook(
    webhooks: Webhooks, visitor: ManagesWebhooks, webhook_id: WebhookId
) -> Response:
    """Remove a webhook."""
    await webhooks.remove(visitor.tenant_id, webhook_id, actor=visitor.caller.actor)
    return redirect(f"{visitor.home}/webhooks", done="removed")
