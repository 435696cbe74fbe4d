"""Webhooks: register, test and remove, and the states of their deliveries."""

from typing import Annotated, Any, Final

from fastapi import APIRouter, Depends, Request, Response

from gateway.accounts.webhooks.routes import WebhookCreation, WebhookId, Webhooks
from gateway.console.forms import checked
from gateway.console.rendering import confirmation, page
from gateway.console.routing import FORM, SentForm, TenantRoute, Visitor, needs, redirect
from gateway.console.tables import Adding, Cell, Column, Field, Table
from gateway.records.records import Webhook
from gateway.records.scopes import Scope

EVENTS: Final = 50
FIELDS: Final = (
    Field("url", "URL", type="url", placeholder="https://example.com/hook", is_required=True),
    Field("thresholds", "Thresholds in percent", placeholder="50 80 100"),
)
NOTICES: Final = {
    "tested": "The test event is sent within seconds. Load the page again to see its state.",
    "removed": "The webhook is removed and receives no more events.",
}

router = APIRouter(route_class=TenantRoute, prefix="/webhooks", include_in_schema=False)

ManagesWebhooks = Annotated[Visitor, Depends(needs(Scope.KEYS, whole=True))]


@router.api_route("", methods=FORM)
async def list_webhooks(
    request: Request, webhooks: Webhooks, visitor: ManagesWebhooks, form: SentForm
) -> Response:
    """List webhooks; register one, and show its secret, once."""
    if not form.is_sent:
        found = await webhooks.list_of_tenant(visitor.tenant_id)
        columns = (
            Column(
                "URL", lambda each: Cell(each.url, f"{visitor.home}/webhooks/{each.id}"), "name"
            ),
            Column("Thresholds of budgets", _thresholds, "wide"),
            Column("Created (UTC)", lambda each: each.created_at, "time wide"),
        )
        return page(
            request,
            "list.html",
            title="Webhooks",
            text="URLs that receive an event when a budget reaches a threshold, credits run out "
            "or a batch ends.",
            table=Table("Webhooks", columns, found, "There is no webhook."),
            adding=Adding("Register a webhook", FIELDS, form, "Register"),
            notices=NOTICES,
        )
    values: dict[str, Any] = {"url": form["url"]}
    if form["thresholds"]:
        numbers = form.words("thresholds")
        values["thresholds"] = [int(each) if each.isdecimal() else each for each in numbers]
    body = checked(WebhookCreation, values)
    created = await webhooks.create(
        visitor.tenant_id, body.url, thresholds=body.thresholds, actor=visitor.caller.actor
    )
    return page(request, "webhook_secret.html", webhook=created)


def _thresholds(webhook: Webhook) -> str:
    return f"{', '.join(map(str, webhook.thresholds))} %"


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


@router.api_route("/{webhook_id}/remove", methods=FORM)
async def remove_webhook(
    request: Request,
    webhooks: Webhooks,
    visitor: ManagesWebhooks,
    webhook_id: WebhookId,
    form: SentForm,
) -> Response:
    """Ask for confirmation, then remove a webhook."""
    webhook = await webhooks.get(visitor.tenant_id, webhook_id)
    if form.is_sent:
        await webhooks.remove(visitor.tenant_id, webhook_id, actor=visitor.caller.actor)
        return redirect(f"{visitor.home}/webhooks", done="removed")
    return confirmation(
        request,
        title="Remove the webhook?",
        text=f"{webhook.url} receives no more events, not even those that wait for an attempt.",
        button="Remove the webhook",
    )
