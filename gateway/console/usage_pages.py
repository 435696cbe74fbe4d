"""Filters, names and files of the usage pages.

The caller restricts `wanted` to what the visitor may see.
"""

from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final

from fastapi import Response

from contract.tier import ServiceTier
from gateway.accounts.keys.service import KeyService
from gateway.accounts.projects.service import ProjectService
from gateway.accounts.tenants.service import TenantService
from gateway.billing.usage.pages import (
    USAGE_COLUMNS,
    Writer,
    columns_of,
    usage_row,
    writer_of,
)
from gateway.billing.usage.parts import Dimension, UsageFilter
from gateway.billing.usage.periods import Bucket
from gateway.billing.usage.query import MAX_USAGE_PAGE
from gateway.billing.usage.schemas import (
    RECEIPT_COLUMNS,
    Cell,
    receipt_row,
    to_csv,
    usage_fields,
)
from gateway.billing.usage.service import ReportRequest, UsageService, position
from gateway.console.routing import Visitor
from gateway.console.usage_query import UsageQuery
from gateway.http.connection import Stream
from gateway.http.services import Services
from gateway.models.catalogue import Catalogue
from gateway.platform.concurrency.fair_turns import LoopTurns
from gateway.platform.database.paging import PART, Page, PageRequest
from gateway.records.errors import NotFoundError
from gateway.records.scopes import Scope
from gateway.records.usage_record import Outcome

ROWS: Final = 50
MOST_OPTIONS: Final = 200
"""Names that a filter offers. Where there are more, it is a field to type an id into."""
REQUESTS: Final = "/console/requests"


def sums_file(
    services: Services,
    query: UsageQuery,
    wanted: UsageFilter,
    dimensions: tuple[Dimension, ...],
) -> Response:
    """Return the sums of each day and each value of the dimensions as CSV."""
    service, columns = services.make(UsageService), columns_of(USAGE_COLUMNS, wanted)
    asked = ReportRequest(wanted=wanted, span=query.span, bucket=Bucket.DAY, dimensions=dimensions)

    async def rows() -> AsyncIterator[Iterable[list[Cell]]]:
        after, has_more = None, True
        while has_more:
            report = await service.report(asked, after=after, limit=MAX_USAGE_PAGE)
            yield (usage_row(usage_fields(each), columns) for each in report.slices)
            after, has_more = report.next, report.next is not None

    write = writer_of(services[LoopTurns], wanted)
    return _csv_file("usage", query, wanted, write, columns, rows())


async def pickers(
    services: Services, visitor: Visitor, query: UsageQuery, more: Sequence[str] = ()
) -> list[tuple[str, str, list[tuple[str, str]] | None]]:
    """Return the name, label and options of each filter; None without options if there are many.

    `more` are the filters of single requests.
    """
    models = sorted(filter(visitor.principal.allows_model, services[Catalogue].names))
    found: dict[str, list[tuple[str, str]] | None] = {"model": [(each, each) for each in models]}
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


def requests_file(services: Services, query: UsageQuery, wanted: UsageFilter) -> Response:
    """Return all requests of a period as CSV, newest first."""
    service, columns = services.make(UsageService), columns_of(RECEIPT_COLUMNS, wanted)

    async def rows() -> AsyncIterator[Iterable[list[Cell]]]:
        before, has_more = None, True
        while has_more:
            found = await service.requests(wanted, query.span, before=before, limit=PART)
            yield (receipt_row(each, columns) for each in found.entries)
            has_more = found.has_more
            if has_more:
                before = position(found.entries[-1])

    write = writer_of(services[LoopTurns], wanted)
    return _csv_file("requests", query, wanted, write, columns, rows())


def _csv_file(
    kind: str,
    query: UsageQuery,
    wanted: UsageFilter,
    write: Writer,
    columns: Sequence[str],
    pages: AsyncIterator[Iterable[list[Cell]]],
) -> Response:
    """Return a CSV file that is read page by page, and named by the tenant and the period.

    Raises InvalidParameterError for the query.

    Each page has its own transaction: a slow client holds no connection of the database.
    """
    if query.error is not None:
        raise query.error

    async def content() -> AsyncIterator[str]:
        yield to_csv(columns, ())
        async for rows in pages:
            async for part in write(rows, partial(to_csv, None)):
                yield part

    period = f"{query.span.start:%Y-%m-%d}-{query.span.end:%Y-%m-%d}"
    name = f"{wanted.tenant_id or 'all'}-{kind}-{period}.csv"
    headers = {"content-disposition": f'attachment; filename="{name}"'}
    return Stream(content(), media_type="text/csv", headers=headers)
