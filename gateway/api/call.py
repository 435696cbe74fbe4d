"""Who calls: the first thing that every route asks."""

from collections.abc import Awaitable, Callable
from typing import Annotated

from fastapi import Depends, Request

from gateway.accounts.scopes import Scope
from gateway.api.context import ProcessContext, context_of
from gateway.auth.principal import Principal


async def authorize(request: Request, *scopes: Scope) -> Principal:
    """Return who the request acts as.

    Raises what `Authenticator.authenticate` raises, and PermissionDeniedError without one of the scopes.
    """
    client = request.client
    principal = await context_of(request).authenticator.authenticate(
        request.headers.get("authorization"), address=None if client is None else client.host
    )
    principal.require_scope(*scopes)
    return principal


def requires(*scopes: Scope) -> Callable[[Request], Awaitable[Principal]]:
    """Return a dependency that authorizes the caller for a route of the management API."""

    async def dependency(request: Request) -> Principal:
        return await authorize(request, *scopes)

    return dependency


Context = Annotated[ProcessContext, Depends(context_of)]
CanManageKeys = Annotated[Principal, Depends(requires(Scope.KEYS))]
CanManageMembers = Annotated[Principal, Depends(requires(Scope.MEMBERS))]
CanSeeUsage = Annotated[Principal, Depends(requires(Scope.USAGE))]
CanAdminister = Annotated[Principal, Depends(requires(Scope.ADMIN))]
CanSeeEverything = Annotated[Principal, Depends(requires(Scope.ADMIN, Scope.ADMIN_READ))]
