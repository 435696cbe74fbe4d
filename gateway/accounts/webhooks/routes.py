"""Webhooks for budget events of a tenant.

Tenants have these routes at `/v1/webhooks`, operators at `/admin/tenants/{tenant_id}/webhooks`.
"""

from datetime import datetime
from typing import Annotated, Literal

from fastapi import Path
from pydantic import BaseModel, Field

from gateway.accounts.routes_common import (
    ListBody,
    OfTenant,
    PageSize,
    RecordBody,
    RequestBody,
    TenantRouter,
    own_tenant,
)
from gateway.accounts.webhooks.service import (
    DEFAULT_THRESHOLDS,
    MAX_THRESHOLDS,
    MAX_URL_CHARACTERS,
    WebhookService,
)
from gateway.http.services import made
from gateway.platform.database.paging import Page
from gateway.platform.database.tables import WebhookEventRow
from gateway.records.records import Webhook
from gateway.records.scopes import Scope


class WebhookCreation(RequestBody):
    """A webhook to create."""

    url: str = Field(
        min_length=1,
        max_length=MAX_URL_CHARACTERS,
        description="https URL on the public internet, which receives events by POST; or "
        "`mailto:` and an address, if the deployment sends mail.",
        examples=["https://example.com/hooks/sluice"],
    )
    thresholds: list[Annotated[int, Field(strict=True, ge=1, le=100)]] = Field(
        list(DEFAULT_THRESHOLDS),
        min_length=1,
        max_length=MAX_THRESHOLDS,
        description="Different percentages of a budget at which an event is sent.",
    )


class WebhookBody(RecordBody):
    """A webhook: receives an event when a tenant's budget or credit is nearly used up."""

    object: Literal["webhook"] = "webhook"
    id: str
    tenant_id: str
    url: str
    thresholds: list[int]
    created_at: datetime


class CreatedWebhookBody(WebhookBody):
    """A webhook with its secret."""

    secret: str = Field(description="Signs the events. Store it: it cannot be shown again.")


class RemovedWebhook(BaseModel):
    """A removed webhook."""

    object: Literal["webhook.deleted"] = "webhook.deleted"
    id: str
    deleted: Literal[True] = True


class EventStateBody(RecordBody):
    """An event, and whether the webhook has received it."""

    object: Literal["webhook.event"] = "webhook.event"
    id: str = Field(description="Id of the event, as in its body and header.")
    type: str = Field(validation_alias="kind")
    created_at: datetime
    attempts: int
    delivered_at: datetime | None
    next_attempt_at: datetime | None = Field(description="Null once delivered or abandoned.")
    last_error: str = Field(description="Empty if no attempt has failed.")


class SentEventBody(BaseModel):
    """A test event that checks whether the webhook works."""

    object: Literal["webhook.event"] = "webhook.event"
    id: str = Field(description="Id of the event, as in its body and header.")
    type: str
    created_at: datetime


router = TenantRouter("/webhooks", "Webhooks", own_tenant(Scope.KEYS, of_tenant=True))

Webhooks = Annotated[WebhookService, made(WebhookService.of)]
WebhookId = Annotated[str, Path(max_length=63, description="Id of the webhook.")]


@router.get("", summary="List webhooks", response_model=ListBody[WebhookBody])
async def list_webhooks(webhooks: Webhooks, caller: OfTenant) -> Page[Webhook]:
    """List webhooks, oldest first, without their secrets.

    All routes under `/v1/webhooks` need the scope `keys` and a credential of the whole account.
    """
    return Page(await webhooks.list_of_tenant(caller.tenant_id), has_more=False)


@router.post("", summary="Register a webhook", response_model=CreatedWebhookBody)
async def create_webhook(webhooks: Webhooks, caller: OfTenant, body: WebhookCreation) -> Webhook:
    """Create a webhook. It gets an event when a tenant, project or key budget reaches a threshold.

    Only this response contains the secret that signs the events. A tenant can have at most five
    webhooks.
    """
    return await webhooks.create(
        caller.tenant_id, body.url, thresholds=body.thresholds, actor=caller.actor
    )


@router.get(
    "/{webhook_id}/events",
    summary="List the events of a webhook",
    response_model=ListBody[EventStateBody],
)
async def list_events(
    webhooks: Webhooks, caller: OfTenant, webhook_id: WebhookId, limit: PageSize = 20
) -> Page[WebhookEventRow]:
    """List the newest events, newest first, with the states of their delivery."""
    events = await webhooks.events(caller.tenant_id, webhook_id, limit=limit)
    return Page(events, has_more=False)


@router.delete("/{webhook_id}", summary="Remove a webhook")
async def remove_webhook(
    webhooks: Webhooks, caller: OfTenant, webhook_id: WebhookId
) -> RemovedWebhook:
    """Remove the webhook. It receives no more events, not even pending ones."""
    await webhooks.remove(caller.tenant_id, webhook_id, actor=caller.actor)
    return RemovedWebhook(id=webhook_id)


@router.post("/{webhook_id}:test", summary="Test a webhook")
async def try_webhook(webhooks: Webhooks, caller: OfTenant, webhook_id: WebhookId) -> SentEventBody:
    """Send the event `webhook.test` within seconds, at most once a minute."""
    sent = await webhooks.test(caller.tenant_id, webhook_id)
    return SentEventBody(id=sent.id, type=sent.name.kind, created_at=sent.created_at)
