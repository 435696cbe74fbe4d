"""Request and response bodies of webhooks."""

from datetime import datetime
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, Field

from gateway.management.shared.fields import ListBody, RequestBody
from gateway.management.webhooks.service import DEFAULT_THRESHOLDS, MAX_THRESHOLDS
from gateway.management.webhooks.store import WebhookEvent
from gateway.management.webhooks.urls import MAX_URL_CHARACTERS
from gateway.tenancy.records import Webhook


class WebhookCreation(RequestBody):
    """A webhook to create."""

    url: str = Field(
        min_length=1,
        max_length=MAX_URL_CHARACTERS,
        description="https URL on the public internet, which receives events by POST.",
        examples=["https://example.com/hooks/sluice"],
    )
    thresholds: list[Annotated[int, Field(strict=True, ge=1, le=100)]] = Field(
        list(DEFAULT_THRESHOLDS),
        min_length=1,
        max_length=MAX_THRESHOLDS,
        description="Different percentages of a budget at which an event is sent.",
    )


class WebhookBody(BaseModel):
    """A webhook: receives an event when a tenant's budget or credit is nearly used up."""

    object: Literal["webhook"] = "webhook"
    id: str
    tenant_id: str
    url: str
    thresholds: list[int]
    created_at: datetime

    @classmethod
    def of(cls, webhook: Webhook) -> Self:
        """Return the response body of a webhook."""
        return cls(**_shown(webhook))


class CreatedWebhookBody(WebhookBody):
    """A webhook with its secret."""

    secret: str = Field(description="Signs the events. Store it: it cannot be shown again.")

    @classmethod
    def of_created(cls, webhook: Webhook) -> Self:
        """Return the response body of a new webhook, the only one with its secret."""
        return cls(**_shown(webhook), secret=webhook.secret)


def _shown(webhook: Webhook) -> dict[str, Any]:
    return {
        "id": webhook.id,
        "tenant_id": webhook.tenant_id,
        "url": webhook.url,
        "thresholds": list(webhook.thresholds),
        "created_at": webhook.created_at,
    }


class WebhookList(ListBody[WebhookBody]):
    """All webhooks of a tenant, oldest first."""

    @classmethod
    def of(cls, webhooks: list[Webhook]) -> Self:
        """Return the response body of the list."""
        return cls(data=[WebhookBody.of(webhook) for webhook in webhooks], has_more=False)


class RemovedWebhook(BaseModel):
    """A removed webhook."""

    object: Literal["webhook.deleted"] = "webhook.deleted"
    id: str
    deleted: Literal[True] = True


class SentEventBody(BaseModel):
    """A test event that checks whether the webhook works."""

    object: Literal["webhook.event"] = "webhook.event"
    id: str = Field(description="Id of the event, as in its body and header.")
    type: str
    created_at: datetime

    @classmethod
    def of(cls, event: WebhookEvent) -> Self:
        """Return the response body of an event."""
        return cls(id=event.id, type=event.name.kind, created_at=event.created_at)
