"""The services that a process has opened, which routes and features receive by type."""

from collections.abc import Mapping
from typing import Any, TypeVar

from fastapi import Depends, Request

T = TypeVar("T")


class Services:
    """The services of a process by type."""

    def __init__(self, by_type: Mapping[type[Any], object]) -> None:
        self._by_type = by_type

    def __getitem__(self, kind: type[T]) -> T:
        """Return the service of a type. Raises KeyError if the process has none."""
        service: Any = self._by_type[kind]
        return service  # type: ignore[no-any-return]

    def __contains__(self, kind: type[object]) -> bool:
        """Whether the process has a service of this type."""
        return kind in self._by_type

    def with_others(self, by_type: Mapping[type[Any], object]) -> "Services":
        """Return a copy in which these services replace those of the same types."""
        return Services({**self._by_type, **by_type})


def services_of(request: Request) -> Services:
    """Return the services of the process that serves `request`."""
    services: Services = request.app.state.services
    return services


def provided(kind: type[T]) -> Any:
    """Return the declaration of a route's parameter that is the service of this type."""

    def of_process(request: Request) -> T:
        return services_of(request)[kind]

    return Depends(of_process)
