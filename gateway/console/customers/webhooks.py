"""Webhooks: register, test and remove, and the states of their deliveries."""

from typing import Annotated, Final

from fastapi import APIRouter, Depends, Response

from gateway.accounts.webhooks.routes import WebhookCreation, WebhookId, Webhooks
from gateway.console.formats import show_time
from gateway.console.forms import checked, values_of
from gateway.console.routing import FORM, TenantRoute, needs, redirect
from gateway.console.tables import Adding, Cell, Column, Field, Table
from gateway.console.visitor import Visitor
from gateway.platform.database.tables import WebhookEventRow
from gateway.records.records import Webhook
from gateway.records.scopes import Scope

EVENTS: Final = 50
FIELDS: Final = (
    Field("url", "URL", type="url", placeholder="https://example.com/hook", is_required=True),
    Field("thresholds", "Thresholds in percent", type="words", placeholder="50 80 100"),
)
NOTICES: Final = {
    "tested": "The test event is sent within seconds. Load the page again to see its state.",
    "removed": "The webhook is removed and receives no more events.",
}

router = APIRouter(route_class=TenantRoute, prefix="/webhooks", include_in_schema=False)

Manager = Annotated[Visitor, Depends(needs(Scope.KEYS, whole=True))]


@router.api_route("", methods=FORM)
async def list_webhooks(visitor: Manager, webhooks: Webhooks) -> Response:
    """List webhooks; register one, and show its secret, once."""
    form, home = visitor.form, f"{visitor.home}/webhooks"
    if form.is_sent:
        values = values_of(FIELDS, form)
        if numbers := values.get("thresholds"):
            values["thresholds"] = [int(each) if each.isdecimal() else each for each in numbers]
        body = checked(WebhookCreation, values)
        created = await webhooks.create(
            visitor.tenant_id, body.url, thresholds=body.thresholds, actor=visitor.caller.actor
        )
        return visitor.page("webhook_secret.html", webhook=created)
    return visitor.list_page(
        "Webhooks",
        (
            Column("URL", lambda each: Cell(each.url, f"{home}/{each.id}"), "name"),
            Column("Thresholds of budgets", _thresholds, "wide"),
            Column("Created (UTC)", lambda each: each.created_at, "time wide"),
        ),
        await webhooks.list_of_tenant(visitor.tenant_id),
        "There is no webhook.",
        text="URLs that receive an event when a budget reaches a threshold, credits run out or a "
        "batch ends.",
        adding=Adding("Register a webhook", FIELDS, form, "Register"),
        notices=NOTICES,
    )


def _delivery(event: WebhookEventRow) -> Cell:
    if event.delivered_at:
        return Cell(f"delivered {show_time(event.delivered_at)} UTC", kind="good")
    if event.next_attempt_at:
        return Cell(f"next attempt {show_time(event.next_attempt_at)} UTC")
    return Cell("abandoned", kind="bad")


EVENT_COLUMNS: Final = (
    Column("Event", lambda each: each.id, "mono"),
    Column("Type", lambda each: each.kind),
    Column("Created (UTC)", lambda each: each.created_at, "time"),
    Column("State", _delivery),
    Column("Attempts", lambda each: each.attempts, "num"),
    Column("Last error", lambda each: each.last_error, "below"),
)


def _thresholds(webhook: Webhook) -> str:
    return f"{', '.join(map(str, webhook.thresholds))} %"


@router.get("/{webhook_id}")
async def show(visitor: Manager, webhooks: Webhooks, webhook_id: WebhookId) -> Response:
    """Show a webhook and its newest events."""
    events = await webhooks.events(visitor.tenant_id, webhook_id, limit=EVENTS)
    return visitor.page(
        "webhook.html",
        webhook=await webhooks.get(visitor.tenant_id, webhook_id),
        events=Table("Events", EVENT_COLUMNS, events, "There was no event yet."),
        notices=NOTICES,
    )


@router.post("/{webhook_id}/test")
async def test(visitor: Manager, webhooks: Webhooks, webhook_id: WebhookId) -> Response:
    """Send a test event."""
    await webhooks.test(visitor.tenant_id, webhook_id)
    return redirect(f"{visitor.home}/webhooks/{webhook_id}", done="tested")


@router.api_route("/{webhook_id}/remove", methods=FORM)
async def remove(visitor: Manager, webhooks: Webhooks, webhook_id: WebhookId) -> Response:
    """Ask for confirmation, then remove a webhook."""
    webhook = await webhooks.get(visitor.tenant_id, webhook_id)
    if visitor.form.is_sent:
        await webhooks.remove(visitor.tenant_id, webhook_id, actor=visitor.caller.actor)
        return redirect(f"{visitor.home}/webhooks", done="removed")
    return visitor.confirmation(
        "Remove the webhook",
        text=f"{webhook.url} receives no more events, not even those that wait for an attempt.",
    )
