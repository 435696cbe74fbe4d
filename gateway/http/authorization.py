"""Authorize a request: the first step of every route."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Final

from fastapi import APIRouter, Depends, Request

from common.tracing import AUTHENTICATE, TENANT_ID
from gateway.auth.authenticator import Authenticator
from gateway.dialects.profile import PROFILES, Profile
from gateway.dialects.profile_choice import DIALECT_HEADER, dialect_of
from gateway.http.allowances import FailedLogins, network_of
from gateway.http.bounded_route import BoundedRoute
from gateway.http.exchange import exchange_of
from gateway.http.query import require_known_query
from gateway.http.services import services_of
from gateway.platform import tracing
from gateway.platform.concurrency.fair_turns import LoopTurns
from gateway.platform.settings import Settings
from gateway.records.errors import AuthenticationError, ErrorStyle, ExpiredCredentialError
from gateway.records.principal import Principal
from gateway.records.scopes import Scope

API_KEY_HEADER: Final = "x-api-key"
AZURE_KEY_HEADER: Final = "api-key"
"""The header of Azure's clients, which every dialect accepts."""


@dataclass(eq=False)
class Authorizer:
    """Authenticates requests by their headers, and limits the attempts that fail."""

    _settings: Settings
    _authenticator: Authenticator
    _failed_logins: FailedLogins
    _loop_turns: LoopTurns

    async def authorize(
        self, request: Request, *scopes: Scope, model_decides: bool = False
    ) -> Principal:
        """Return the principal of the request.

        Sets `tenant_id` and `cors_origins` of its exchange. With `model_decides`, the model may
        choose the dialect; the caller then calls `require_header_of`. Raises the errors of
        `Authenticator.authenticate`, of `require_header_of` and of `require_known_query`, and
        PermissionDeniedError if the principal has none of the scopes.
        """
        exchange = exchange_of(request.scope)
        if exchange.session is not None:
            return self._admitted(request, exchange.session, scopes)
        client, failed_logins = request.client, self._failed_logins
        address = None if client is None else client.host
        authorization = credential_of(request.headers)
        network = network_of(address or "")
        # Accept a known key even while an attacker uses the same address.
        if not failed_logins.is_left(network) and not self._authenticator.cached_tenant(
            authorization
        ):
            failed_logins.require(network)
        with tracing.span(AUTHENTICATE):
            try:
                principal = await self._authenticator.authenticate(authorization, address=address)
            except AuthenticationError as error:
                failed_logins.use(network)
                if isinstance(error, ExpiredCredentialError) and error.principal is not None:
                    exchange.sent_by(error.principal)
                raise
            exchange.sent_by(principal)
            exchange.cors_origins = principal.cors_origins
            await self._loop_turns.enter(principal.tenant_id)
            if "authorization" not in request.headers:
                dialect = dialect_of(request.headers.get(DIALECT_HEADER, "")) or principal.dialect
                if dialect is not None or not model_decides:
                    require_header_of(request, PROFILES[dialect or self._settings.default_dialect])
        return self._admitted(request, principal, scopes)

    def _admitted(
        self, request: Request, principal: Principal, scopes: Sequence[Scope]
    ) -> Principal:
        principal.require_scope(*scopes)
        if request.scope["query_string"]:
            require_known_query(request)
        tracing.note({TENANT_ID: principal.tenant_id})
        return principal


def credential_of(headers: Mapping[str, str]) -> str | None:
    """Return the header Authorization, or what it would be for Api-Key or X-Api-Key."""
    authorization = headers.get("authorization")
    key = headers.get(AZURE_KEY_HEADER) or headers.get(API_KEY_HEADER)
    return f"Bearer {key}" if authorization is None and key else authorization


def require_header_of(request: Request, profile: Profile) -> None:
    """Reject a key in X-Api-Key, llama.cpp's and Anthropic's header, in other dialects.

    Call it for an authorized request. Raises AuthenticationError.
    """
    exchange = exchange_of(request.scope)
    is_known = any(map(request.headers.get, ("authorization", AZURE_KEY_HEADER)))
    is_known = is_known or exchange.session is not None
    style = exchange.error_style
    takes_key = ErrorStyle.ANTHROPIC is style or profile.error_style is ErrorStyle.LLAMACPP
    if not (takes_key or is_known):
        raise AuthenticationError(
            "The header 'X-Api-Key' is accepted in dialect llamacpp and in Anthropic's API only. "
            f"Given: dialect {profile.name}. Send 'Authorization: Bearer YOUR_KEY'."
        )


def requires(*scopes: Scope, of_tenant: bool = False) -> Callable[[Request], Awaitable[Principal]]:
    """Return a dependency that authorizes the caller for a route of the management API.

    `of_tenant`: whether the route concerns the whole tenant, so that it rejects project
    credentials.
    """

    async def dependency(request: Request) -> Principal:
        principal = await services_of(request)[Authorizer].authorize(request, *scopes)
        if of_tenant:
            principal.grant.require_whole_tenant()
        return principal

    return dependency


async def authorize_operator(request: Request) -> Principal:
    """Authorize the caller of a route of the Admin API; only `admin` may change something."""
    scopes = (Scope.ADMIN, Scope.ADMIN_READ) if request.method == "GET" else (Scope.ADMIN,)
    principal = await services_of(request)[Authorizer].authorize(request, *scopes)
    return replace(principal, is_operator=True)


def operators_router(tag: str, prefix: str = "") -> APIRouter:
    """Return a router of the Admin API, which authorizes the caller of each of its routes."""
    authorized = [Depends(authorize_operator)]
    return APIRouter(
        prefix=f"/admin{prefix}", tags=[tag], route_class=BoundedRoute, dependencies=authorized
    )


CanManageMembers = Annotated[Principal, Depends(requires(Scope.MEMBERS, of_tenant=True))]
Operator = Annotated[Principal, Depends(authorize_operator)]
"""The caller of a route of the Admin API, which its router has authorized."""
