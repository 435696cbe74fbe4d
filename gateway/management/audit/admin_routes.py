"""Audit log of all tenants: `GET /admin/audit`."""

from typing import Annotated

from fastapi import APIRouter

from gateway.http.authorization import CanSeeEverything, Context
from gateway.management.audit.routes import ActionFilter, After, AuditList, to_list
from gateway.management.audit.service import AuditFilter, AuditService
from gateway.management.shared.parameters import PageSize, text_filter

router = APIRouter(tags=["Audit"])


@router.get("/audit", summary="List changes of all tenants")
async def list_entries(
    context: Context,
    _principal: CanSeeEverything,
    tenant: Annotated[str | None, text_filter("Only changes of this tenant.")] = None,
    actor: Annotated[str | None, text_filter("Only changes by this actor, as listed.")] = None,
    action: ActionFilter = None,
    after: After = None,
    limit: PageSize = 20,
) -> AuditList:
    """List audit entries, newest first.

    `sluice audit verify` checks that no entry was changed or removed.
    """
    wanted = AuditFilter(tenant_id=tenant, actor=actor, action=action)
    page = await AuditService(context.database).page(wanted, before=after, limit=limit)
    return to_list(page, page.entries)
