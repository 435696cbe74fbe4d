"""Queries of requests: a parameter that the route lacks, or a second value, is rejected.

Routes of generations ignore parameters that they lack, and name them.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar, get_args, get_origin

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
_IGNORES_OTHERS: Final = "ignores_other_query"


def takes_query(*names: str, lists: Sequence[str] = ()) -> Callable[[Endpoint], Endpoint]:
    """Return a decorator that names the query parameters of a plain route's endpoint.

    Those of `lists` may be given several times.
    """

    def mark(endpoint: Endpoint) -> Endpoint:
        setattr(endpoint, _NAMES, dict.fromkeys(names, False) | dict.fromkeys(lists, True))
        return endpoint

    return mark


def ignores_other_query(endpoint: Endpoint) -> Endpoint:
    """Mark a plain route's endpoint as one that ignores and names unknown parameters."""
    setattr(endpoint, _IGNORES_OTHERS, True)
    return endpoint


def ignored_query(request: Request) -> tuple[str, ...]:
    """Return the unknown parameters of a request whose route ignores them."""
    scope = request.scope
    if not scope.get("query_string") or not _ignores_others(scope):
        return ()
    known = (*_names_of(scope), *WITHOUT_EFFECT)
    return tuple(name for name in request.query_params if name not in known)


def require_known_query(request: Request) -> None:
    """Reject an unknown parameter that is not ignored, or one that is repeated and no list.

    Raises a BadRequestError that names it.
    """
    given = request.query_params.multi_items()
    known, seen = _names_of(request.scope), set[str]()
    for name, _ in given:
        param = name[:MAX_SHOWN_CHARACTERS]
        if name not in known and _ignores_others(request.scope):
            continue
        if name not in known and name not in WITHOUT_EFFECT:
            names = ", ".join(known) or "none"
            raise UnknownParameterError(
                f"The query must have only known parameters: {names}. Given: {shown(name)}.",
                param=param,
            )
        if name in seen and not known.get(name):
            values = [value for other, value in given if other == name]
            raise InvalidParameterError(
                f"The query must have '{param}' once. Given: {shown(values)}.", param=param
            )
        seen.add(name)


def _ignores_others(scope: Scope) -> bool:
    return getattr(scope["endpoint"], _IGNORES_OTHERS, False)


def _names_of(scope: Scope) -> dict[str, bool]:
    """Return the names of a route's parameters, and whether each is a list."""
    route = scope.get("route")
    if not isinstance(route, APIRoute):
        return getattr(scope["endpoint"], _NAMES, {})
    dependants, found = [route.dependant], dict[str, bool]()
    for dependant in dependants:
        for field in dependant.query_params:
            annotation = field.field_info.annotation
            kinds = (annotation, *get_args(annotation))
            found[field.alias] = any(get_origin(each) is list for each in kinds)
        dependants += dependant.dependencies
    return found
