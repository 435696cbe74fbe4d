"""Audit log: `GET /v1/audit` of the caller's tenant, `GET /admin/audit` of all tenants."""

from typing import Annotated, Any, Final

from fastapi import APIRouter, Query

from gateway.accounts.audit.log import AuditEntryBody, AuditService
from gateway.accounts.routes_common import PLAIN, CursorPage, PageSize, text_filter
from gateway.http.authorization import CanManageMembers, operators_router
from gateway.http.services import made
from gateway.platform.database.paging import Page
from gateway.records.principal import Principal

OPERATOR: Final = "operator"
"""Actor that customers see instead of any operator."""
OPERATORS_ACTORS: Final = ("cli:", "operator:")
"""Prefixes of operator actors."""
_INTERNALS: Final = frozenset({"source", "sha256", "weight", "stripe_customer_id"})
"""Details of tenants and adapters that are for operators: paths, shares, and other systems' ids."""
_EXPORTS: Final = "export."
"""Prefix of actions on billing systems, whose names are for operators, too."""
MAX_SEQUENCE: Final = 2**53

router = APIRouter(tags=["Audit"])
operators = operators_router("Audit")

ActionFilter = Annotated[str | None, text_filter("Only this action, such as `key.revoke`.")]
Audit = Annotated[AuditService, made(AuditService)]
After = Annotated[
    int | None,
    Query(ge=1, le=MAX_SEQUENCE, description="`next` of the previous page; absent: the newest."),
    PLAIN,
]


class AuditList(CursorPage[AuditEntryBody, int]):
    """A page of changes, newest first."""


@router.get("/v1/audit", summary="List changes of your tenant")
async def list_entries(
    log: Audit,
    principal: CanManageMembers,
    action: ActionFilter = None,
    after: After = None,
    limit: PageSize = 20,
) -> AuditList:
    """List audit entries, newest first. Needs the scope `members`."""
    return await own_entries(log, principal, action=action, after=after, limit=limit)


@operators.get("/audit", name="list_entries", summary="List changes of all tenants")
async def list_all_entries(
    log: Audit,
    tenant: Annotated[str | None, text_filter("Only changes of this tenant.")] = None,
    actor: Annotated[str | None, text_filter("Only changes by this actor, as listed.")] = None,
    action: ActionFilter = None,
    after: After = None,
    limit: PageSize = 20,
) -> AuditList:
    """List audit entries, newest first.

    `sluice audit verify` checks that no entry was changed or removed.
    """
    wanted = {"tenant_id": tenant, "actor": actor, "action": action}
    page = await log.page(before=after, limit=limit, **wanted)
    return to_list(page, page.entries)


async def own_entries(
    log: AuditService,
    principal: Principal,
    *,
    action: str | None,
    after: int | None,
    limit: int,
) -> AuditList:
    """Return a page of the changes of a tenant, as its members see them."""
    page = await log.page_of(principal.tenant_id, action=action, before=after, limit=limit)
    return to_list(page, [_for_customers(entry) for entry in page.entries])


def to_list(page: Page[AuditEntryBody], entries: list[AuditEntryBody]) -> AuditList:
    """Return the response body of a page."""
    following = entries[-1].sequence if page.has_more else None
    return AuditList(data=entries, has_more=page.has_more, next=following)


def _for_customers(entry: AuditEntryBody) -> AuditEntryBody:
    details = {name: value for name, value in entry.details.items() if name not in _INTERNALS}
    changes: dict[str, Any] = {"details": details}
    if entry.actor.startswith(OPERATORS_ACTORS):
        changes["actor"] = OPERATOR
    if entry.action.startswith(_EXPORTS):
        changes |= {"subject": entry.tenant, "details": {}}
    return entry.model_copy(update=changes)
