"""The pages that a credential may open."""

from collections.abc import Iterator

from gateway.records.principal import Principal
from gateway.records.scopes import Scope


def navigation(principal: Principal) -> Iterator[tuple[str, str]]:
    """Yield the paths and names of pages, in the order of the menu."""
    return _for_operators() if principal.is_operator else _for_customers(principal)


def _for_customers(principal: Principal) -> Iterator[tuple[str, str]]:
    scopes, is_whole = principal.scopes, principal.project_id is None
    yield "/console", "Overview"
    if scopes & {Scope.COMPLETIONS, Scope.USAGE}:
        yield "/console/usage", "Usage"
        yield "/console/requests", "Requests"
        yield "/console/rejected", "Rejected"
    if Scope.USAGE in scopes and is_whole:
        yield "/console/invoices", "Invoices"
        if principal.is_prepaid:
            yield "/console/credits", "Credits"
    yield "/console/limits", "Limits"
    if Scope.COMPLETIONS in scopes:
        yield "/console/models", "Models"
        yield "/console/playground", "Playground"
        yield "/console/batches", "Batches"
        yield "/console/files", "Files"
    if Scope.KEYS in scopes:
        yield "/console/keys", "Keys"
        yield "/console/projects", "Projects"
    if Scope.KEYS in scopes and is_whole:
        yield "/console/spend-limits", "Spend limits"
        yield "/console/webhooks", "Webhooks"
        yield "/console/adapters", "Adapters"
    if Scope.MEMBERS in scopes and is_whole:
        yield "/console/members", "Members"
        yield "/console/audit", "Audit log"
    yield "/console/start", "Getting started"


def _for_operators() -> Iterator[tuple[str, str]]:
    yield "/console", "Overview"
    yield "/console/tenants", "Tenants"
    yield "/console/plans", "Plans"
    yield "/console/models", "Models"
    yield "/console/adapters", "Adapters"
    yield "/console/aliases", "Aliases"
    yield "/console/usage", "Usage"
    yield "/console/requests", "Requests"
    yield "/console/refusals", "Rejected"
    yield "/console/money", "Money"
    yield "/console/prices", "Prices"
    yield "/console/capacity", "Capacity"
    yield "/console/audit", "Audit log"
