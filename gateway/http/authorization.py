"""Authorize a request: the first step of every route."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Annotated, Final

from fastapi import Depends, Request
from starlette.requests import ClientDisconnect

from contract.tracing import AUTHENTICATE, TENANT_ID
from gateway import tracing
from gateway.auth.principal import Principal
from gateway.dialects.profile import PROFILES, Profile
from gateway.dialects.profile_choice import DIALECT_HEADER, dialect_of
from gateway.errors import AuthenticationError, ErrorStyle
from gateway.http.allowances import BYTES_OF_USE, network_of
from gateway.http.body import read_json_body
from gateway.http.context import ProcessContext, context_of
from gateway.tenancy.scopes import Scope

API_KEY_HEADER: Final = "x-api-key"
AZURE_KEY_HEADER: Final = "api-key"
"""The header of Azure's clients, which every dialect accepts."""


async def read_body(request: Request, tenant_id: str) -> bytes | bytearray:
    """Read the body of a request for which `allow_unpaid` was called, and count it if unpaid.

    Raises the errors of `read_json_body`.
    """
    try:
        content = await read_json_body(request, context_of(request), sender=tenant_id)
    except ClientDisconnect:
        count_unpaid(request)
        raise
    if not request.state.is_paid:
        count_unpaid(request)
    return content


async def authorize(request: Request, *scopes: Scope, model_decides: bool = False) -> Principal:
    """Return the principal of the request.

    Sets `tenant_id` and `cors_origins` of `request.state`. With `model_decides`, the model may
    choose the dialect; the caller then calls `require_header_of`. Raises the errors of
    `Authenticator.authenticate`, those of `require_header_of`, and PermissionDeniedError if the
    principal has none of the scopes.
    """
    context, client, state = context_of(request), request.client, request.state
    address = None if client is None else client.host
    authorization = credential_of(request.headers)
    network = network_of(address or "")
    # Accept a known key even while an attacker uses the same address.
    if not context.failed_logins.is_left(network) and not context.authenticator.cached_tenant(
        authorization
    ):
        context.failed_logins.require(network)
    with tracing.span(AUTHENTICATE):
        try:
            principal = await context.authenticator.authenticate(authorization, address=address)
        except AuthenticationError:
            context.failed_logins.use(network)
            raise
        state.tenant_id = principal.tenant_id
        state.cors_origins = principal.cors_origins
        await context.loop_turns.enter(principal.tenant_id)
        if "authorization" not in request.headers:
            dialect = dialect_of(request.headers.get(DIALECT_HEADER, "")) or principal.dialect
            if dialect is not None or not model_decides:
                default = context.settings.default_dialect
                require_header_of(request, PROFILES[dialect or default])
        principal.require_scope(*scopes)
    tracing.note({TENANT_ID: principal.tenant_id})
    return principal


def credential_of(headers: Mapping[str, str]) -> str | None:
    """Return the header Authorization, or what it would be for Api-Key or X-Api-Key."""
    authorization = headers.get("authorization")
    key = headers.get(AZURE_KEY_HEADER) or headers.get(API_KEY_HEADER)
    return f"Bearer {key}" if authorization is None and key else authorization


def require_header_of(request: Request, profile: Profile) -> None:
    """Reject a key in X-Api-Key, llama.cpp's header, in other dialects.

    Call it for an authorized request. Raises AuthenticationError.
    """
    is_known = any(map(request.headers.get, ("authorization", AZURE_KEY_HEADER)))
    if profile.error_style is not ErrorStyle.LLAMACPP and not is_known:
        raise AuthenticationError(
            "The header 'X-Api-Key' is accepted in dialect llamacpp only. Given: dialect "
            f"{profile.name}. Send 'Authorization: Bearer YOUR_KEY'."
        )


def allow_unpaid(request: Request, principal: Principal, *, is_paid: bool = False) -> None:
    """Count an unpaid request; one that `is_paid` counts only if it fails.

    Raises TooManyUnpaidError if its key has reached the limit.
    """
    allowance, state = context_of(request).unpaid, request.state
    caller = f"{principal.tenant_id} {principal.credential_id}"
    allowance.require(caller)
    state.caller, state.is_paid = caller, is_paid
    if not is_paid:
        allowance.use(caller)


def count_unpaid(request: Request, *, is_fault: bool = False) -> None:
    """Count the bytes read from the body of an unpaid request.

    If `is_fault`, the request itself counts too, unless it has been counted. Nothing counts before
    `allow_unpaid`.
    """
    state = request.state
    if hasattr(state, "caller"):
        uses = getattr(state, "body_bytes", 0) // BYTES_OF_USE + (is_fault and state.is_paid)
        state.body_bytes = 0
        context_of(request).unpaid.use(state.caller, uses)


def requires(*scopes: Scope, of_tenant: bool = False) -> Callable[[Request], Awaitable[Principal]]:
    """Return a dependency that authorizes the caller for a route of the management API.

    `of_tenant`: whether the route concerns the whole tenant, so that it rejects project
    credentials.
    """

    async def dependency(request: Request) -> Principal:
        principal = await authorize(request, *scopes)
        if of_tenant:
            principal.grant.require_whole_tenant()
        return principal

    return dependency


def operates(*scopes: Scope) -> Callable[[Request], Awaitable[Principal]]:
    """Return a dependency that authorizes the caller for a route of the Admin API."""

    async def dependency(request: Request) -> Principal:
        return replace(await authorize(request, *scopes), is_operator=True)

    return dependency


Context = Annotated[ProcessContext, Depends(context_of)]
CanManageMembers = Annotated[Principal, Depends(requires(Scope.MEMBERS, of_tenant=True))]
CanAdminister = Annotated[Principal, Depends(operates(Scope.ADMIN))]
CanSeeEverything = Annotated[Principal, Depends(operates(Scope.ADMIN, Scope.ADMIN_READ))]
