"""Filters and names of the usage pages."""

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

from contract.tier import ServiceTier
from gateway.accounts.keys.service import KeyService
from gateway.accounts.projects.service import ProjectService
from gateway.accounts.tenants.service import TenantService
from gateway.console.tables import pairs
from gateway.console.usage_query import UsageQuery
from gateway.console.visitor import Visitor
from gateway.http.services import Services
from gateway.models.catalogue import Catalogue
from gateway.platform.database.paging import Page, PageRequest
from gateway.records.errors import NotFoundError
from gateway.records.scopes import Scope
from gateway.records.usage_record import Outcome

MOST_OPTIONS: Final = 200
"""Names that a filter offers. Where there are more, it is a field to type an id into."""


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
