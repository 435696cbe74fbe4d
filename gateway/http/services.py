"""The services that a process has opened, which routes and features receive by type."""

import inspect
from collections.abc import Callable, Mapping
from functools import cache
from typing import Annotated, Any, TypeVar

from fastapi import Depends, Request

T = TypeVar("T")


class Services:
    """The services of a process by type."""

    def __init__(self, by_type: Mapping[type[Any], Any]) -> None:
        self._by_type = by_type

    @classmethod
    def of(cls, *services: object) -> "Services":
        """Return services of different types, each by its own type."""
        return cls({type(each): each for each in services})

    def __getitem__(self, kind: type[T]) -> T:
        """Return the service of a type. Raises KeyError if the process has none."""
        service: T = self._by_type[kind]
        return service

    def find(self, kind: type[T]) -> T | None:
        """Return the service of a type; None if the process has none."""
        service: T | None = self._by_type.get(kind)
        return service

    def make(self, make: Callable[..., T]) -> T:
        """Call a class or function with the services that its required parameters name by type."""
        return make(**{name: self._by_type[kind] for name, kind in _required(make).items()})

    def with_others(self, by_type: Mapping[type[Any], Any]) -> "Services":
        """Return a copy in which these services replace those of the same types."""
        return Services({**self._by_type, **by_type})


@cache
def _required(make: Callable[..., Any]) -> dict[str, type[Any]]:
    """Return the names and types of the parameters without a default."""
    return {
        name: parameter.annotation
        for name, parameter in inspect.signature(make, eval_str=True).parameters.items()
        if parameter.default is parameter.empty
    }


def services_of(request: Request) -> Services:
    """Return the services of the process that serves `request`."""
    services: Services = request.app.state.services
    return services


def provided(kind: type[T]) -> Any:
    """Return the declaration of a route's parameter that is the service of a type."""
    return _depends(lambda services: services[kind])


def made(make: Callable[..., T]) -> Any:
    """Return the declaration of a route's parameter that `Services.make` returns."""
    return _depends(lambda services: services.make(make))


def _depends(find: Callable[[Services], T]) -> Any:
    # FastAPI calls functions that are not async in a thread.
    async def of_process(request: Request) -> T:
        return find(services_of(request))

    return Depends(of_process)


AllServices = Annotated[Services, _depends(lambda services: services)]
