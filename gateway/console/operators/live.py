"""What a tenant's requests do now, and their cancellation."""

from collections.abc import Iterator
from typing import Final
from urllib.parse import quote

from fastapi import APIRouter, Response

from gateway.accounts.routes_common import TenantId
from gateway.billing.live import AfterPosition, Live, LiveRequestBody
from gateway.billing.usage.routes import RequestId
from gateway.console.formats import duration
from gateway.console.lists import ROWS
from gateway.console.routing import FORM, AnyVisitor, OperatorRoute, redirect
from gateway.console.tables import Cell, Column, Table
from gateway.console.visitor import Visitor

NOTICES: Final = {
    "cancelled": "The request is cancelled.",
    "asked": "The gateway of the request does not react. The request ends when another gateway or "
    "the sweep finds it.",
}

router = APIRouter(
    prefix="/console/tenants/{tenant_id}/live", route_class=OperatorRoute, include_in_schema=False
)


@router.get("")
async def list_live(
    visitor: AnyVisitor, live: Live, tenant_id: TenantId, after: AfterPosition = None
) -> Response:
    """List the tenant's live requests, oldest first; htmx loads the first page again and again."""
    found = await live.page(tenant_id, after=after, limit=ROWS)
    return visitor.page(
        "operators/live.html",
        tenant_id=tenant_id,
        home=_path(tenant_id),
        table=Table("Live requests", [*_columns(visitor)], found.data, "No request waits or runs."),
        total=found.total,
        is_complete=found.is_complete,
        is_first=after is None,
        following=visitor.following(found.next),
        notices=NOTICES,
    )


@router.api_route("/{request_id}/cancel", methods=FORM)
async def cancel(
    visitor: AnyVisitor, live: Live, tenant_id: TenantId, request_id: RequestId
) -> Response:
    """Ask for confirmation, then cancel a request."""
    if visitor.form.is_sent:
        has_ended = await live.cancel(tenant_id, request_id, actor=visitor.caller.actor)
        return redirect(_path(tenant_id), done="cancelled" if has_ended else "asked")
    found = await live.get(tenant_id, request_id)
    return visitor.confirmation(
        "Cancel the request",
        facts={
            "Request": found.id,
            "Tenant": found.tenant,
            "Key": found.key,
            "Model": found.model,
            "State": f"{found.state} for {found.age_ms / 1000:.1f} s",
        },
        text="Its client gets the error request_cancelled. The tenant pays for the work so far.",
        back=_path(tenant_id),
    )


def _columns(visitor: Visitor) -> Iterator[Column]:
    def cancellation(each: LiveRequestBody) -> Cell:
        if each.batch_line:
            return Cell(f"line {each.batch_line}")
        href = f"{_path(each.tenant)}/{quote(each.id, safe='')}/cancel"
        return Cell("Cancel", href, label=f"Cancel {each.id}")

    yield Column("Request", lambda each: each.id, "mono")
    if visitor.may_change:
        yield Column("", cancellation)
    yield Column("State", lambda each: Cell(each.state, kind="bad" if each.state == "lost" else ""))
    yield Column("Age", lambda each: duration(each.age_ms), "num")
    yield Column("Tokens in", lambda each: each.prompt_tokens, "num")
    yield Column("Tokens out", lambda each: each.completion_tokens, "num")
    yield Column("Model", lambda each: each.model)
    yield Column("Key", lambda each: each.key, "mono")
    yield Column("Workers", lambda each: ", ".join(each.workers), "mono")
    yield Column("Gateway", lambda each: each.gateway, "mono")
    yield Column("Tier", lambda each: each.service_tier)
    yield Column("Prompts", lambda each: each.prompts, "num")


def _path(tenant_id: str) -> str:
    return f"/console/tenants/{quote(tenant_id, safe='')}/live"
