"""Request and response bodies of webhooks."""

from datetime import datetime
from typing import Annotated, Literal, Self

from pydantic import BaseModel, Field

from gateway.accounts.shared.fields import ListBody, RecordBody, RequestBody
from gateway.accounts.webhooks.service import DEFAULT_THRESHOLDS, MAX_THRESHOLDS
from gateway.accounts.webhooks.store import WebhookEvent
from gateway.accounts.webhooks.urls import MAX_URL_CHARACTERS


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


class WebhookList(ListBody[WebhookBody]):
    """All webhooks of a tenant, oldest first."""


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


class EventStateList(ListBody[EventStateBody]):
    """The newest events of a webhook, newest first."""


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
