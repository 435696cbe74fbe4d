"""Who calls, and with what: the first thing that every route asks."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Depends, Request

from gateway.accounts.scopes import Scope
from gateway.api.body import read_json_body
from gateway.api.choosing import profile_of
from gateway.api.context import ProcessContext, context_of
from gateway.auth.principal import Principal
from gateway.dialects.choice import DIALECT_HEADER
from gateway.dialects.profile import Profile
from gateway.dialects.wire import parse_object


@dataclass(frozen=True, slots=True)
class Call:
    """An authorized request to the generation API."""

    context: ProcessContext
    principal: Principal
    profile: Profile
    body: dict[str, Any]


async def read_call(request: Request) -> Call:
    """Authorize the caller, read the body, and choose the dialect. Raises an ApiError.

    From then on the client gets its errors in its own dialect.
    """
    context = context_of(request)
    principal = await authorize(request, Scope.COMPLETIONS)
    body = parse_object(await read_json_body(request, context.settings))
    header = request.headers.get(DIALECT_HEADER)
    profile = await profile_of(context, principal, body, header=header)
    request.state.error_style = profile.error_style
    return Call(context, principal, profile, body)


async def authorize(request: Request, *scopes: Scope) -> Principal:
    """Return who the request acts as; `request.state.tenant_id` tells whose it is from then on.

    Raises what `Authenticator.authenticate` raises, and PermissionDeniedError without one of the scopes.
    """
    client = request.client
    principal = await context_of(request).authenticator.authenticate(
        request.headers.get("authorization"), address=None if client is None else client.host
    )
    request.state.tenant_id = principal.tenant_id
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
