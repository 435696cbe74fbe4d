"""Live requests of a tenant, and their cancellation: `/admin/tenants/{tenant_id}/live-requests`.

Reservations show which requests are live, the queues of their models how far they are. Nothing is
stored for this: a request that is not listed costs nothing.
"""

import asyncio
from bisect import bisect_right
from collections.abc import Sequence
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Final, Literal

from fastapi import Query
from pydantic import BaseModel, Field

from common import clock
from contract.messages import CancelResponse
from contract.outcomes import JobReceipt, JobState
from contract.queue import JobQueue
from contract.scripts import CommandExecutor
from gateway.accounts.audit.log import SYSTEM
from gateway.accounts.changes import changing
from gateway.accounts.routes_common import (
    MAX_CURSOR_CHARACTERS,
    PRINTABLE,
    CursorPage,
    PageSize,
    TenantId,
)
from gateway.accounts.tenants.service import reading_of_tenant
from gateway.billing.usage.pages import read_cursor
from gateway.billing.usage.query import encode_cursor
from gateway.billing.usage.routes import RequestId
from gateway.completions.queue.notices import send_notices
from gateway.http.authorization import Operator, operators_router
from gateway.http.services import made
from gateway.limits.store import QuotaStore
from gateway.platform.database.engine import Database
from gateway.records.checks import is_storable
from gateway.records.errors import ConflictError, NotFoundError, shown
from gateway.records.times import to_time
from gateway.records.usage_record import UsageRecord

MOST_JOBS: Final = 100
"""Prompts of a request whose jobs are read."""
CANCEL_SECONDS: Final = 5.0
"""How long a gateway has to end a request."""
ASK_AGAIN_SECONDS: Final = 1.0
LOOK_SECONDS: Final = 0.05


class LiveState(StrEnum):
    """What happens with a live request."""

    STARTING = "starting"  # It is admitted; its jobs are not on the queue yet.
    WAITING = "waiting"  # No worker has claimed its jobs.
    RUNNING = "running"  # A worker runs at least one of its jobs.
    ENDING = "ending"  # Its jobs have ended, and it is not settled yet.
    LOST = "lost"  # Its gateway is gone; another one or the sweep continues or settles it.


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


class LiveRequestList(CursorPage[LiveRequestBody, str]):
    """A page of the live requests of a tenant, oldest first."""

    total: int = Field(description="Live requests of the tenant.")
    is_complete: bool = Field(
        description="False if there are so many live requests that the list may lack some."
    )


class LiveRequests:
    """Lists and cancels live requests. All methods raise RedisError and StoreUnavailableError."""

    def __init__(self, database: Database, executor: CommandExecutor) -> None:
        self._database = database
        self._executor = executor
        self._quotas = QuotaStore(executor)

    async def page(self, tenant_id: str, *, after: str | None, limit: int) -> LiveRequestList:
        """Return a page of the tenant's live requests, after a cursor. Raises NotFoundError."""
        position = read_cursor(after)
        async with reading_of_tenant(self._database, tenant_id):
            pass
        found = await self._quotas.live(tenant_id)
        start = 0 if position is None else bisect_right(found.requests, position)
        wanted = found.requests[start : start + limit]
        drafts = await asyncio.gather(
            *(self._quotas.draft(tenant_id, request_id) for _, request_id in wanted)
        )
        records = [draft for draft in drafts if draft is not None]
        alive = await self._quotas.living({record.gateway for record in records})
        entries = await asyncio.gather(
            *(self._described(record, is_alive=record.gateway in alive) for record in records)
        )
        has_more = start + limit < len(found.requests)
        return LiveRequestList(
            data=entries,
            has_more=has_more,
            next=encode_cursor(*map(str, wanted[-1])) if has_more else None,
            total=len(found.requests),
            is_complete=found.is_complete,
        )

    async def get(self, tenant_id: str, request_id: str) -> LiveRequestBody:
        """Return a live request. Raises NotFoundError."""
        record = await self._find(tenant_id, request_id)
        alive = await self._quotas.living({record.gateway})
        return await self._described(record, is_alive=bool(alive))

    async def cancel(self, tenant_id: str, request_id: str, *, actor: str = SYSTEM) -> bool:
        """Cancel a live request. Return False if its gateway has not ended it after some seconds.

        The client gets the error `request_cancelled`, and the tenant pays for the work so far.
        Raises NotFoundError, and ConflictError for a line of a batch.
        """
        record = await self._find(tenant_id, request_id)
        if record.line:
            batch_id = record.line.rpartition(":")[0]
            raise ConflictError(
                f"The request {shown(request_id)} is a line of the batch {shown(batch_id)}. "
                "Cancel the batch."
            )
        details = {"model": record.full_model, "key": record.credential_id}
        async with changing(self._database, tenant_id, actor=actor) as change:
            await change.audit("request.cancel", request_id, details)
        loop = asyncio.get_running_loop()
        deadline, ask_at = loop.time() + CANCEL_SECONDS, loop.time()
        while loop.time() < deadline:
            # Another gateway may take the request over meanwhile.
            draft = await self._quotas.draft(tenant_id, request_id)
            if draft is None:
                return True
            if loop.time() >= ask_at:
                ask_at += ASK_AGAIN_SECONDS
                # A request that resumed after its settlement has the id of its first reservation.
                cancels = [CancelResponse(draft.request_id.partition(".")[0])]
                gateway = draft.gateway
                await send_notices(self._executor, gateway, sender="operator", cancels=cancels)
            await asyncio.sleep(LOOK_SECONDS)
        return False

    async def _find(self, tenant_id: str, request_id: str) -> UsageRecord:
        async with reading_of_tenant(self._database, tenant_id):
            pass
        draft = None
        if is_storable(request_id):
            draft = await self._quotas.draft(tenant_id, request_id)
        if draft is None:
            raise NotFoundError(
                f"The tenant {shown(tenant_id)} has no live request {shown(request_id)}."
            )
        return draft

    async def _described(self, record: UsageRecord, *, is_alive: bool) -> LiveRequestBody:
        job_ids = record.job_ids[:MOST_JOBS]
        queue = JobQueue(self._executor, record.model)
        receipts, workers = await asyncio.gather(queue.receipts(job_ids), queue.holders_of(job_ids))
        return LiveRequestBody(
            id=record.request_id,
            tenant=record.tenant_id,
            key=record.credential_id,
            project=record.project_id,
            model=record.full_model,
            endpoint=record.endpoint,
            service_tier=record.service_tier,
            stream=record.is_streamed,
            batch_line=record.line or None,
            state=_state(receipts) if is_alive else LiveState.LOST,
            created_at=to_time(record.created_ms),
            age_ms=max(clock.now_ms() - record.created_ms, 0),
            prompts=record.jobs,
            prompt_tokens=sum(receipt.prompt_tokens for receipt in receipts),
            completion_tokens=sum(receipt.completion_tokens for receipt in receipts),
            workers=sorted(workers),
            gateway=record.gateway,
        )


def _state(receipts: Sequence[JobReceipt]) -> LiveState:
    states = {receipt.state for receipt in receipts}
    if JobState.RUNNING in states:
        return LiveState.RUNNING
    if JobState.WAITING in states:
        return LiveState.WAITING
    return LiveState.ENDING if JobState.ENDED in states else LiveState.STARTING


class CancelledRequest(BaseModel):
    """A cancelled live request."""

    object: Literal["live_request.cancelled"] = "live_request.cancelled"
    id: str
    has_ended: bool = Field(
        description="False if its gateway has not ended it within five seconds. It then ends "
        "later, or another gateway or the sweep settles it."
    )


router = operators_router("Live requests", "/tenants/{tenant_id}/live-requests")

Live = Annotated[LiveRequests, made(LiveRequests)]
AfterPosition = Annotated[
    str | None,
    Query(
        min_length=1,
        max_length=MAX_CURSOR_CHARACTERS,
        pattern=PRINTABLE,
        description="`next` of the previous page; absent: the first page.",
    ),
]


@router.get("", summary="List a tenant's live requests")
async def list_live_requests(
    live: Live, tenant_id: TenantId, after: AfterPosition = None, limit: PageSize = 20
) -> LiveRequestList:
    """List the requests that wait or run now, oldest first."""
    return await live.page(tenant_id, after=after, limit=limit)


@router.post("/{request_id}:cancel", summary="Cancel a live request")
async def cancel_live_request(
    live: Live, operator: Operator, tenant_id: TenantId, request_id: RequestId
) -> CancelledRequest:
    """Cancel a request. Its client gets `request_cancelled`; the tenant pays for the work so far.

    The audit log records it. A line of a batch gets 409: cancel the batch.
    """
    has_ended = await live.cancel(tenant_id, request_id, actor=operator.actor)
    return CancelledRequest(id=request_id, has_ended=has_ended)
