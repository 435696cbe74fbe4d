"""Usage by day, model, key and so on, single requests and their receipts, for both audiences."""

import asyncio
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Annotated, Any, Final, NamedTuple
from urllib.parse import quote

from fastapi import APIRouter, Depends, Response

from contract.tier import ServiceTier
from gateway.accounts.keys.service import KeyService
from gateway.accounts.projects.service import ProjectService
from gateway.accounts.tenants.service import TenantService
from gateway.billing.usage.files import report_file, requests_file
from gateway.billing.usage.pages import cursor_of, read_position, read_requests
from gateway.billing.usage.parts import Dimension, UsageFilter, UsageSums
from gateway.billing.usage.periods import Bucket
from gateway.billing.usage.query import decode_cursor, encode_cursor
from gateway.billing.usage.routes import Ledger, RequestId, own_usage
from gateway.billing.usage.schemas import receipt_fields
from gateway.billing.usage.series import by_period
from gateway.billing.usage.service import ReportRequest, UsageService
from gateway.console.charts import COST, TOKENS, Chart, period_chart
from gateway.console.lists import ROWS
from gateway.console.routing import PageRoute, needs, redirect
from gateway.console.tables import pairs
from gateway.console.usage_query import UsageQuery
from gateway.console.visitor import Visitor
from gateway.http.services import AllServices, Services
from gateway.models.catalogue import Catalogue
from gateway.platform.concurrency.fair_turns import LoopTurns
from gateway.platform.database.paging import Page, PageRequest
from gateway.records.errors import NotFoundError, must
from gateway.records.scopes import Scope
from gateway.records.usage_record import Outcome, UsageRecord

USAGE: Final = "/console/usage"
REQUESTS: Final = "/console/requests"
VIEWS: Final = (Dimension.MODEL, Dimension.KEY, Dimension.PROJECT)
"""Dimensions of charts and table; the table can also show days or hours, or tenants."""
BY_PERIOD: Final = "period"
MOST_OPTIONS: Final = 200
"""Names that a filter offers. Where there are more, it is a field to type an id into."""

SeesUsage = Annotated[Visitor, Depends(needs(Scope.USAGE, Scope.COMPLETIONS))]


def usage_router(route_class: type[PageRoute]) -> APIRouter:
    """Return the routes of one audience."""
    router = APIRouter(route_class=route_class, include_in_schema=False)
    for path, handle in (
        (USAGE, usage),
        (f"{USAGE}.csv", usage_csv),
        (REQUESTS, requests),
        (f"{REQUESTS}.csv", requests_csv),
        (f"{REQUESTS}/{{request_id}}", receipt),
    ):
        router.add_api_route(path, handle)
    return router


async def usage(visitor: SeesUsage, services: AllServices) -> Response:
    """Show sums of a period as charts and a table; or what is wrong with the query."""
    query, views = UsageQuery(visitor.request), _views(visitor)
    by = query.form["by"] or next(iter(views))
    dimension, found = _dimension(by, views), _Sums()
    if query.error is None:
        found = await _sums(services, visitor, query, dimension)
    return visitor.page(
        "usage.html",
        error=query.error,
        query=query,
        pickers=await pickers(services, visitor, query),
        by=by,
        views=list(views.items()),
        following=found.next and query.link(USAGE, after=encode_cursor(*found.next)),
        **found._asdict(),
    )


class _Sums(NamedTuple):
    rows: Sequence[tuple[str, UsageSums]] = ()
    names: Mapping[str, str] = MappingProxyType({})
    charts: Sequence[Chart] = ()
    next: tuple[str, ...] | None = None


async def _sums(
    services: Services, visitor: Visitor, query: UsageQuery, dimension: Dimension | None
) -> _Sums:
    service, wanted = services.make(UsageService), _wanted(visitor, query.wanted)
    names, rows = dict[str, str](), list[tuple[str, UsageSums]]()
    following = None
    if dimension is None:
        periods = await by_period(service, wanted, query.span)
        rows = [*zip(reversed(periods.names), reversed(periods.sums), strict=True)]
    else:
        after = decode_cursor(query.form["after"] or None, parts=2)
        periods, (rows, following) = await asyncio.gather(
            by_period(service, wanted, query.span, dimension),
            service.by_dimension(wanted, query.span, dimension, after=after, limit=ROWS),
        )
    if dimension is Dimension.KEY:
        ids = {*periods.parts, *(key for key, _ in rows)}
        names |= await key_names(services, visitor, ids)
    title = "Revenue" if visitor.is_operator else "Cost"
    charts = (
        period_chart(title, COST, periods, "cost_micros", names),
        period_chart("Tokens", TOKENS, periods, "tokens", names),
    )
    return _Sums(rows, names, charts, following)


async def usage_csv(visitor: SeesUsage, services: AllServices) -> Response:
    """Return the sums of each day and each value of a dimension as CSV."""
    query, views = UsageQuery(visitor.request), _views(visitor)
    dimension = _dimension(query.form["by"] or next(iter(views)), views)
    asked = ReportRequest(
        wanted=_wanted(visitor, query.wanted),
        span=query.checked_span(),
        bucket=Bucket.DAY,
        dimensions=() if dimension is None else (dimension,),
    )
    return report_file(services.make(UsageService), services[LoopTurns], asked)


async def requests(visitor: SeesUsage, services: AllServices) -> Response:
    """List single requests, newest first, or show the one with the id that is given."""
    query = UsageQuery(visitor.request)
    if query.form["id"] and query.error is None:
        return redirect(f"{REQUESTS}/{quote(query.form['id'], safe='')}")
    wanted = _wanted(visitor, query.wanted)
    service, start = services.make(UsageService), read_position(query.form["newer"] or None)
    found: list[UsageRecord] | None = None if query.error is None else []
    previous = following = None
    if start is not None and found is None:
        newer = await service.newer_requests(wanted, query.span, after=start, limit=ROWS)
        if newer.has_more:
            found = newer.entries
            previous, following = cursor_of(found[0]), cursor_of(found[-1])
    if found is None:
        after = None if query.form["newer"] else query.form["after"] or None
        found, following = await read_requests(service, wanted, query.span, after=after, limit=ROWS)
        previous = cursor_of(found[0]) if after and found else None
    return visitor.page(
        "requests.html",
        error=query.error,
        query=query,
        pickers=await pickers(services, visitor, query, ("outcome", "tier")),
        names=await key_names(services, visitor, {each.credential_id for each in found}),
        receipts=[*map(receipt_fields, found)],
        previous=previous and query.link(REQUESTS, newer=previous),
        following=following and query.link(REQUESTS, after=following),
    )


async def requests_csv(visitor: SeesUsage, services: AllServices) -> Response:
    """Return all requests of a period as CSV, newest first."""
    query = UsageQuery(visitor.request)
    service, turns = services.make(UsageService), services[LoopTurns]
    return requests_file(service, turns, _wanted(visitor, query.wanted), query.checked_span())


async def receipt(visitor: SeesUsage, usage: Ledger, request_id: RequestId) -> Response:
    """Show the receipt of one request."""
    wanted = _wanted(visitor, UsageFilter(tenant_id=None))
    record = await usage.request(wanted, request_id)
    return visitor.page("receipt.html", record=record, receipt=receipt_fields(record))


def _wanted(visitor: Visitor, wanted: UsageFilter) -> UsageFilter:
    """Return the part of the usage that the visitor may see."""
    return wanted if visitor.is_operator else own_usage(visitor.principal, wanted)


def _views(visitor: Visitor) -> Mapping[str, str]:
    """Return the names of the views; the first one is shown if none is chosen."""
    known = (Dimension.TENANT, *VIEWS) if visitor.is_operator else VIEWS
    return {each.value: each.capitalize() for each in known} | {BY_PERIOD: "Day or hour"}


def _dimension(by: str, views: Mapping[str, str]) -> Dimension | None:
    if by not in views:
        raise must("by", f"be one of {', '.join(views)}", by)
    return None if by == BY_PERIOD else Dimension(by)


async def pickers(
    services: Services, visitor: Visitor, query: UsageQuery, more: Sequence[str] = ()
) -> list[tuple[str, str, list[tuple[str, str]] | None]]:
    """Return the name, label and options of each filter; None without options if there are many.

    `more` are the filters of single requests.
    """
    models = sorted(filter(visitor.principal.allows_model, services[Catalogue].names))
    found: dict[str, list[tuple[str, str]] | None] = {"model": pairs(models)}
    wanted, grantor = PageRequest(None, MOST_OPTIONS, is_newest_first=True), None
    tenant_id = visitor.tenant_id
    if visitor.is_operator:
        tenant_id = query.form["tenant"]
        tenants = await services.make(TenantService).page(wanted)
        found["tenant"] = options_of(tenants)
    else:
        grantor = visitor.principal.grant
    found |= {"key": None, "project": None}
    if tenant_id and (visitor.is_operator or visitor.has(Scope.KEYS)):
        with suppress(NotFoundError):
            keys = await services.make(KeyService).page(tenant_id, wanted, grantor=grantor)
            projects = await services.make(ProjectService).page(tenant_id, wanted, grantor=grantor)
            found |= {"key": options_of(keys), "project": options_of(projects)}
    known = {"tier": ServiceTier, "outcome": Outcome}
    found |= {name: [(each, each.replace("_", " ")) for each in known[name]] for name in more}
    return [
        (name, name.capitalize(), _with_chosen(options, query.form[name]))
        for name, options in found.items()
    ]


def options_of(found: Page[Any]) -> list[tuple[str, str]] | None:
    """Return the ids and names of a list; None if it has a second page."""
    return None if found.has_more else [(each.id, each.name) for each in found.entries]


def _with_chosen(
    options: list[tuple[str, str]] | None, chosen: str
) -> list[tuple[str, str]] | None:
    """Return the options of a filter, which may have a value that is in none of them."""
    if options is None:
        return None
    is_known = not chosen or any(value == chosen for value, _ in options)
    return [("", "all"), *options, *([] if is_known else [(chosen, chosen)])]


async def key_names(
    services: Services, visitor: Visitor, ids: Collection[str]
) -> Mapping[str, str]:
    """Return the names of keys, for customers who may list them."""
    if visitor.is_operator or not visitor.has(Scope.KEYS):
        return {}
    return await services.make(KeyService).names(
        visitor.tenant_id, ids, grantor=visitor.principal.grant
    )
