"""Limits, the audit log, and how to start."""

import shlex
from typing import Annotated, Final

from fastapi import APIRouter, Depends, Query, Request, Response
from msgspec import json

from gateway.accounts.audit.log import AuditService
from gateway.accounts.audit.routes import MAX_SEQUENCE, own_entries
from gateway.accounts.limits import LimitReports
from gateway.console.limit_fields import LABELS, shown_limit
from gateway.console.rendering import page
from gateway.console.routing import AnyVisitor, CustomerRoute, Visitor, needs, origin_of
from gateway.console.sessions import Audience
from gateway.http.services import AllServices
from gateway.models.catalogue import Catalogue
from gateway.records.scopes import Scope

ROWS: Final = 50
_HELLO: Final = {"messages": [{"role": "user", "content": "Hello!"}]}

router = APIRouter(route_class=CustomerRoute, include_in_schema=False)

SeesAudit = Annotated[Visitor, Depends(needs(Scope.MEMBERS, whole=True))]


@router.get("/console/limits")
async def limits(request: Request, services: AllServices, visitor: AnyVisitor) -> Response:
    """Show the limits with their usage."""
    return page(
        request,
        "limits.html",
        report=await services.make(LimitReports).own_limits(visitor.principal),
        refusals=await services.make(LimitReports).own_refusals(visitor.principal),
        labels=LABELS,
        shown_limit=shown_limit,
    )


@router.get("/console/audit")
async def audit(
    request: Request,
    services: AllServices,
    visitor: SeesAudit,
    *,
    action: Annotated[str, Query(max_length=100)] = "",
    after: Annotated[int | None, Query(ge=1, le=MAX_SEQUENCE)] = None,
) -> Response:
    """Show changes of the tenant, newest first."""
    found = await own_entries(
        services.make(AuditService),
        visitor.principal,
        action=action or None,
        after=after,
        limit=ROWS,
    )
    following = None if found.next is None else f"/console/audit?after={found.next}"
    return page(request, "audit.html", entries=found.data, action=action, following=following)


@router.get("/console/start")
async def start(request: Request, services: AllServices, visitor: AnyVisitor) -> Response:
    """Show how to send the first request."""
    names = sorted(filter(visitor.principal.allows_model, services[Catalogue].names))
    model = visitor.principal.default_model or (names[0] if names else "YOUR_MODEL")
    return page(
        request,
        "start.html",
        base_url=base_url(request),
        chat=shlex.quote(json.encode({"model": model, **_HELLO}).decode()),
        model=json.encode(model).decode(),
        models=names,
    )


def base_url(request: Request) -> str:
    """Return the URL of the API."""
    return f"{origin_of(request, Audience.CUSTOMERS)}/v1"
