"""The search box: keys, models, batches, requests, tenants and pages by their names or ids."""

from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Annotated, Final, NamedTuple
from urllib.parse import quote, urlencode

from fastapi import APIRouter, Query, Response

from gateway.accounts.keys.service import KeyService
from gateway.accounts.routes_common import MAX_TEXT_CHARACTERS
from gateway.accounts.tenants.service import TenantService
from gateway.batches.files.service import Owner
from gateway.batches.routes import BatchService
from gateway.billing.usage.parts import UsageFilter
from gateway.billing.usage.routes import own_usage
from gateway.billing.usage.service import UsageService
from gateway.console.formats import shortened
from gateway.console.lists import MOST_SORTED
from gateway.console.navigation import navigation
from gateway.console.routing import AnyVisitor, PageRoute, redirect
from gateway.console.tables import Cell, Column
from gateway.console.visitor import Visitor, tenant_path
from gateway.http.services import AllServices, Services
from gateway.models.catalogue import Catalogue
from gateway.platform.database.paging import PageRequest
from gateway.records.checks import is_storable
from gateway.records.errors import NotFoundError
from gateway.records.scopes import Scope

SEARCH: Final = "/console/search"
_ALL: Final = PageRequest(limit=MOST_SORTED, is_newest_first=True)


class Found(NamedTuple):
    """Something that a visitor may open."""

    kind: str
    name: str
    href: str


COLUMNS: Final = (
    Column("Name", lambda each: Cell(each.name, each.href), "name"),
    Column("Kind", lambda each: each.kind),
)


def search_router(route_class: type[PageRoute]) -> APIRouter:
    """Return the route of one audience."""
    router = APIRouter(route_class=route_class, include_in_schema=False)
    router.add_api_route(SEARCH, search)
    return router


async def search(
    visitor: AnyVisitor,
    services: AllServices,
    q: Annotated[str, Query(max_length=MAX_TEXT_CHARACTERS)] = "",
) -> Response:
    """Open the only thing that is found, or list what is found."""
    text, found = q.strip(), list[Found]()
    if text and is_storable(text):
        first = _of_operators if visitor.is_operator else _own
        found = [Found("page", name, href) for href, name in navigation(visitor.principal)]
        found = [each for each in found if _has(text, each.name)]
        for part in (first, _models, _requests):
            found += [each async for each in part(visitor, services, text)]
    if len(found) == 1:
        return redirect(found[0].href)
    return visitor.list_page(
        f"Search for “{text}”" if text else "Search",
        COLUMNS,
        found,
        "Nothing was found. Requests and keys are found by their whole ids.",
        label="Results",
    )


async def _own(visitor: Visitor, services: Services, text: str) -> AsyncIterator[Found]:
    if visitor.has(Scope.KEYS):
        grantor = visitor.caller.grant
        keys = await services.make(KeyService).page(visitor.tenant_id, _ALL, grantor=grantor)
        for key in keys.entries:
            if _has(text, key.name, key.id, f"sk-{key.prefix}-"):
                yield Found("key", key.name, f"/console/keys/{key.id}")
    if visitor.has(Scope.COMPLETIONS):
        owner = Owner(visitor.tenant_id, visitor.principal.project_id)
        for batch in (await services.make(BatchService).page(owner, _ALL)).entries:
            if _has(text, batch.id, *(batch.labels or {}).values()):
                yield Found("batch", shortened(batch.id), f"/console/batches/{batch.id}")


async def _of_operators(_visitor: Visitor, services: Services, text: str) -> AsyncIterator[Found]:
    for tenant in (await services.make(TenantService).page(_ALL, text=text)).entries:
        yield Found("tenant", tenant.name, tenant_path(tenant.id))
    if (key := await services.make(KeyService).find_anywhere(text)) is not None:
        yield Found("key", key.name, f"{tenant_path(key.tenant_id)}/keys/{key.id}")


async def _models(visitor: Visitor, services: Services, text: str) -> AsyncIterator[Found]:
    if visitor.is_operator or visitor.has(Scope.COMPLETIONS):
        page = "prices" if visitor.is_operator else "playground"
        for model in sorted(filter(visitor.principal.allows_model, services[Catalogue].names)):
            if _has(text, model):
                yield Found("model", model, f"/console/{page}?{urlencode({'model': model})}")


async def _requests(visitor: Visitor, services: Services, text: str) -> AsyncIterator[Found]:
    wanted = UsageFilter(tenant_id=None)
    if not visitor.is_operator:
        if not visitor.has(Scope.COMPLETIONS, Scope.USAGE):
            return
        wanted = own_usage(visitor.principal, wanted)
    with suppress(NotFoundError):
        found = await services.make(UsageService).request(wanted, text)
        href = f"/console/requests/{quote(found.request_id, safe='')}"
        yield Found("request", found.request_id, href)


def _has(text: str, *names: str) -> bool:
    return any(text.casefold() in name.casefold() for name in names)
