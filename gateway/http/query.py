"""Queries of requests: a parameter that the route lacks, or that occurs twice, is rejected."""

from collections.abc import Callable
from typing import Any, Final, TypeVar

from fastapi import Request
from fastapi.routing import APIRoute
from starlette.types import Scope

from gateway.records.errors import (
    MAX_SHOWN_CHARACTERS,
    InvalidParameterError,
    UnknownParameterError,
    shown,
)

Endpoint = TypeVar("Endpoint", bound=Callable[..., Any])

WITHOUT_EFFECT: Final = ("api-version", "beta")
"""Versions of other APIs, which clients of Azure and Anthropic add to each request."""
_NAMES: Final = "query_names"


def takes_query(*names: str) -> Callable[[Endpoint], Endpoint]:
    """Return a decorator that names the query parameters of a plain route's endpoint."""

    def mark(endpoint: Endpoint) -> Endpoint:
        setattr(endpoint, _NAMES, names)
        return endpoint

    return mark


def require_known_query(request: Request) -> None:
    """Reject an unknown or repeated parameter. Raises a BadRequestError that names it."""
    given = request.query_params.multi_items()
    known, seen = _names_of(request.scope), set[str]()
    for name, _ in given:
        param = name[:MAX_SHOWN_CHARACTERS]
        if name not in known and name not in WITHOUT_EFFECT:
            names = ", ".join(known) or "none"
            raise UnknownParameterError(
                f"The query must have only known parameters: {names}. Given: {shown(name)}.",
                param=param,
            )
        if name in seen:
            values = [value for other, value in given if other == name]
            raise InvalidParameterError(
                f"The query must have '{param}' once. Given: {shown(values)}.", param=param
            )
        seen.add(name)


def _names_of(scope: Scope) -> tuple[str, ...]:
    route = scope.get("route")
    if not isinstance(route, APIRoute):
        names: tuple[str, ...] = getattr(scope["endpoint"], _NAMES, ())
        return names
    dependants, found = [route.dependant], dict[str, None]()
    for dependant in dependants:
        found.update((field.alias, None) for field in dependant.query_params)
        dependants += dependant.dependencies
    return tuple(found)
