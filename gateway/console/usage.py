"""Usage by day, model, key and so on, single requests and their receipts, for both audiences."""

import asyncio
import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from operator import itemgetter
from typing import Annotated, Any, Final, NamedTuple
from urllib.parse import quote

from fastapi import APIRouter, Depends, Response
from msgspec import json

from contract.tier import ServiceTier
from gateway.accounts.keys.service import KeyService
from gateway.accounts.projects.service import ProjectService
from gateway.accounts.tenants.service import TenantService
from gateway.billing.usage.files import report_file, requests_file
from gateway.billing.usage.pages import cursor_of, read_position, read_requests
from gateway.billing.usage.parts import Dimension, UsageFilter, UsageSums
from gateway.billing.usage.periods import Bucket
from gateway.billing.usage.routes import Ledger, RequestId, own_usage
from gateway.billing.usage.schemas import receipt_fields
from gateway.billing.usage.series import by_period
from gateway.billing.usage.service import ReportRequest, UsageService
from gateway.console.charts import COST, TOKENS, Chart, period_chart
from gateway.console.formats import duration, shortened
from gateway.console.lists import MOST_SORTED, ROWS, arranged
from gateway.console.routing import PageRoute, base_url, needs, redirect
from gateway.console.tables import Cell, Column, Table, pairs
from gateway.console.usage_query import OUTCOMES, UsageQuery
from gateway.console.visitor import Visitor, tenant_path
from gateway.dialects.endpoint import CHATS, COMPLETIONS, ENDPOINTS, MESSAGES
from gateway.http.services import AllServices, Services
from gateway.models.alias_and_adapter_caches import AdapterBook
from gateway.models.catalogue import Catalogue
from gateway.platform.concurrency.fair_turns import LoopTurns
from gateway.platform.database.paging import Page, PageRequest
from gateway.platform.database.tables import FAILED_OUTCOMES
from gateway.records.error_codes import CODES
from gateway.records.errors import NotFoundError, must
from gateway.records.scopes import Scope
from gateway.records.usage_record import UsageRecord

USAGE: Final = "/console/usage"
REQUESTS: Final = "/console/requests"
VIEWS: Final = (Dimension.MODEL, Dimension.KEY, Dimension.PROJECT)
"""Dimensions of charts and table; the table can also show days or hours, or tenants."""
BY_PERIOD: Final = "period"
DATE: Final = "2026-11-01"
MOST_OPTIONS: Final = 200
"""Names that a filter offers. Where there are more, it is a field to type an id into."""

PATHS: Final = {each.name: each.path for each in ENDPOINTS}
SAID: Final[Mapping[str, Mapping[str, Any]]] = {
    COMPLETIONS.name: {"prompt": "..."},
    CHATS.name: {"messages": [{"role": "user", "content": "..."}]},
    MESSAGES.name: {"max_tokens": 100, "messages": [{"role": "user", "content": "..."}]},
}
"""What a request says, by the endpoint; with `...` for what is not stored."""

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
        **found._asdict(),
    )


class _Sums(NamedTuple):
    table: Table | None = None
    by_name: str = ""
    charts: Sequence[Chart] = ()
    following: str | None = None


async def _sums(
    services: Services, visitor: Visitor, query: UsageQuery, dimension: Dimension | None
) -> _Sums:
    service, wanted = services.make(UsageService), _wanted(visitor, query.wanted)
    names, rows = dict[str, str](), list[tuple[str | None, UsageSums]]()
    if dimension is None:
        periods = await by_period(service, wanted, query.span)
        rows += zip(reversed(periods.names), reversed(periods.sums), strict=True)
    else:
        asked = ReportRequest(
            wanted=wanted, span=query.span, bucket=Bucket.TOTAL, dimensions=(dimension,)
        )
        periods, slices = await asyncio.gather(
            by_period(service, wanted, query.span, dimension),
            service.largest(asked, count=MOST_SORTED),
        )
        rows += ((each.values.get(dimension), each.sums) for each in slices)
    if dimension is Dimension.KEY:
        ids = {*periods.parts, *(key for key, _ in rows if key)}
        names |= await key_names(services, visitor, ids)
    title = "Revenue" if visitor.is_operator else "Cost"
    charts = (
        period_chart(title, COST, periods, "cost_micros", names),
        period_chart("Tokens", TOKENS, periods, "tokens", names),
    )
    by = dimension or ("hour" if periods.names and len(periods.names[0]) > len(DATE) else "day")
    columns = [*_columns(query, dimension, names, has_audio=any(s.audio_seconds for _, s in rows))]
    empty = "There was no request in this period."
    shown = arranged(visitor.request, columns, rows, default="-cost" if dimension else "-time")
    table = Table(f"Usage by {by}", columns, shown.rows, empty, sorts=shown.sorts)
    return _Sums(table, by, charts, shown.following)


def _columns(
    query: UsageQuery, dimension: Dimension | None, names: Mapping[str, str], *, has_audio: bool
) -> Iterator[Column]:
    def name(row: tuple[str | None, UsageSums]) -> str | Cell:
        value = row[0]
        if dimension is None:
            return value or ""
        if not value:
            return Cell("all others" if value is None else "none", kind="muted")
        return Cell(names.get(value, value), query.link(REQUESTS, **{dimension: value}))

    yield Column("Time (UTC)" if dimension is None else dimension.capitalize(), name, "name")
    yield Column("Requests", lambda row: row[1].requests, "num")
    yield Column("Failed", lambda row: row[1].failed_requests, "num wide")
    yield Column("Prompt tokens", lambda row: row[1].prompt_tokens, "num wide")
    yield Column("Cached", lambda row: row[1].cached_tokens, "num wide")
    yield Column("Completion tokens", lambda row: row[1].completion_tokens, "num wide")
    if has_audio:
        yield Column("Seconds of audio", lambda row: row[1].audio_seconds, "num wide")
    yield Column("Cost", lambda row: row[1].cost_micros, "money")


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
    names = await key_names(services, visitor, {each.credential_id for each in found})
    return visitor.page(
        "requests.html",
        error=query.error,
        query=query,
        pickers=await pickers(services, visitor, query, ("outcome", "tier")),
        table=Table(
            "Requests",
            [*_receipt_columns(visitor, names)],
            [*map(receipt_fields, found)],
            "There was no request in this period.",
        ),
        previous=previous and query.link(REQUESTS, newer=previous),
        following=following and query.link(REQUESTS, after=following),
    )


def _receipt_columns(visitor: Visitor, names: Mapping[str, str]) -> Iterator[Column]:
    def outcome(each: Mapping[str, Any]) -> Cell:
        text = each["outcome"].replace("_", " ") + (f": {each['code']}" if each["code"] else "")
        return Cell(text, kind="bad" if each["outcome"] in FAILED_OUTCOMES else "")

    def tenant(each: Mapping[str, Any]) -> Cell:
        return Cell(each["tenant"], tenant_path(each["tenant"]))

    def first_token(each: Mapping[str, Any]) -> str | None:
        return duration(each["first_token_ms"]) if each["first_token_ms"] else None

    yield Column(
        "Request",
        lambda each: Cell(shortened(each["id"]), f"{REQUESTS}/{quote(each['id'], safe='')}"),
        "mono",
    )
    yield Column("Time (UTC)", itemgetter("created_at"), "time")
    if visitor.is_operator:
        yield Column("Tenant", tenant, "wide")
    yield Column("Model", itemgetter("model"), "name")
    yield Column("Key", lambda each: names.get(each["key"], shortened(each["key"])))
    yield Column("Tier", itemgetter("service_tier"), "wide")
    yield Column("Outcome", outcome)
    yield Column("First token", first_token, "num wide")
    yield Column("Tokens in", itemgetter("prompt_tokens"), "num wide")
    yield Column("Tokens out", itemgetter("completion_tokens"), "num wide")
    yield Column("Cost", itemgetter("cost_micros"), "money")


async def requests_csv(visitor: SeesUsage, services: AllServices) -> Response:
    """Return all requests of a period as CSV, newest first."""
    query = UsageQuery(visitor.request)
    service, turns = services.make(UsageService), services[LoopTurns]
    return requests_file(service, turns, _wanted(visitor, query.wanted), query.checked_span())


async def receipt(
    visitor: SeesUsage, services: AllServices, usage: Ledger, request_id: RequestId
) -> Response:
    """Show the receipt of one request."""
    wanted = _wanted(visitor, UsageFilter(tenant_id=None))
    is_json = visitor.request.headers.get("accept", "").startswith("application/json")
    try:
        record = await usage.request(wanted, request_id)
    except NotFoundError:
        if not is_json:
            raise
        # The playground asks until there is a receipt; browsers report each 404 as an error.
        return Response(status_code=204)
    if is_json:
        return Response(json.encode(receipt_fields(record)), media_type="application/json")
    return visitor.page(
        "receipt.html",
        record=record,
        receipt=receipt_fields(record),
        reason=CODES.get(record.code),
        names=await key_names(services, visitor, {record.credential_id}),
        url=base_url(visitor.request).removesuffix("/v1"),
        route=PATHS.get(record.endpoint, ""),
        body=shlex.quote(json.encode(_again(record)).decode()),
    )


def _again(record: UsageRecord) -> dict[str, Any]:
    """Return the body of a request without what it said, which is not stored."""
    body = {"model": record.model, **SAID.get(record.endpoint, {"input": "..."})}
    if record.service_tier is not ServiceTier.DEFAULT:
        body["service_tier"] = record.service_tier
    return body | ({"stream": True} if record.is_streamed else {})


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
    models = _models(services, visitor, query)
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
    known: Mapping[str, Iterable[str]] = {"tier": ServiceTier, "outcome": filter(None, OUTCOMES)}
    found |= {name: [(each, each.replace("_", " ")) for each in known[name]] for name in more}
    return [
        (name, name.capitalize(), _with_chosen(options, query.form[name]))
        for name, options in found.items()
    ]


def _models(services: Services, visitor: Visitor, query: UsageQuery) -> list[str]:
    """Return the names in the ledger of the models and adapters that a filter offers."""
    tenant_id = query.form["tenant"] if visitor.is_operator else visitor.tenant_id
    adapters = services[AdapterBook].visible_to(tenant_id)
    names = {*services[Catalogue].names, *(each.full_name for each in adapters)}
    return sorted(filter(visitor.principal.allows_model, names))


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
