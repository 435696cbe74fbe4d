"""Response bodies of live requests."""

from datetime import datetime
from typing import Literal, Self

from pydantic import BaseModel, Field

from gateway.billing.live.service import LivePage, LiveRequest, LiveState
from gateway.billing.usage.query import encode_cursor
from gateway.records.times import to_time


class LiveRequestBody(BaseModel):
    """A request that waits or runs."""

    object: Literal["live_request"] = "live_request"
    id: str
    tenant: str
    key: str = Field(description="Id of the key, or `jwt:SUBJECT`.")
    project: str | None
    model: str
    endpoint: str
    service_tier: str
    stream: bool
    batch_line: str | None = Field(description="Batch and number of a line of a batch.")
    state: LiveState
    created_at: datetime
    age_ms: int
    prompts: int
    prompt_tokens: int = Field(
        description="0 until an engine has processed the prompt. Of the first 100 prompts, as "
        "are the next two."
    )
    completion_tokens: int = Field(description="By the last report of the workers.")
    workers: list[str]
    gateway: str

    @classmethod
    def of(cls, live: LiveRequest) -> Self:
        """Return the response body of a live request."""
        record = live.record
        return cls(
            id=record.request_id,
            tenant=record.tenant_id,
            key=record.credential_id,
            project=record.project_id,
            model=record.full_model,
            endpoint=record.endpoint,
            service_tier=record.service_tier,
            stream=record.is_streamed,
            batch_line=record.line or None,
            state=live.state,
            created_at=to_time(record.created_ms),
            age_ms=live.age_ms,
            prompts=record.jobs,
            prompt_tokens=live.prompt_tokens,
            completion_tokens=live.completion_tokens,
            workers=list(live.workers),
            gateway=record.gateway,
        )


class LiveRequestList(BaseModel):
    """A page of the live requests of a tenant, oldest first."""

    object: Literal["list"] = "list"
    data: list[LiveRequestBody]
    has_more: bool
    next: str | None = Field(description="`after` for the next page; null on the last page.")
    total: int = Field(description="Live requests of the tenant.")
    is_complete: bool = Field(
        description="False if there are so many live requests that the list may lack some."
    )

    @classmethod
    def of(cls, page: LivePage) -> Self:
        """Return the response body of a page."""
        return cls(
            data=[LiveRequestBody.of(each) for each in page.entries],
            has_more=page.next is not None,
            next=following(page),
            total=page.total,
            is_complete=page.is_complete,
        )


class CancelledRequest(BaseModel):
    """A cancelled live request."""

    object: Literal["live_request.cancelled"] = "live_request.cancelled"
    id: str
    has_ended: bool = Field(
        description="False if its gateway has not ended it within five seconds. It then ends "
        "later, or another gateway or the sweep settles it."
    )


def following(page: LivePage) -> str | None:
    """Return the cursor of the next page; None on the last page."""
    return None if page.next is None else encode_cursor(str(page.next[0]), page.next[1])
