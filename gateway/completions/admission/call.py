"""Read a request of the generation API: authorize it, parse its body, choose its dialect."""

from functools import partial
from typing import Any

import msgspec
from fastapi import Request

from contract.tier import ServiceTier
from gateway.completions.admission.model_choice import profile_of
from gateway.completions.context import ProcessContext, context_of
from gateway.dialects.profile import Profile
from gateway.dialects.profile_choice import DIALECT_HEADER
from gateway.dialects.wire import parse_object
from gateway.http.allowances import UnpaidRequests
from gateway.http.authorization import Authorizer, require_header_of
from gateway.http.body import BodyReader
from gateway.http.error_handlers import route_hint
from gateway.http.exchange import exchange_of
from gateway.http.services import services_of
from gateway.platform.concurrency.large_work import Beside, LargeWork
from gateway.records.errors import NotFoundError
from gateway.records.principal import Principal
from gateway.records.scopes import Scope


class BatchLine(msgspec.Struct, frozen=True):
    """What distinguishes a line of a batch from a request over HTTP."""

    id: str
    """Batch and line number."""
    deadline_ms: int
    """Unix time at which its batch expires."""
    tier: ServiceTier
    """Its tier in the queue. It pays the price of batches in any tier."""


class Call(msgspec.Struct, frozen=True):
    """An authorized request to the generation API."""

    context: ProcessContext
    principal: Principal
    profile: Profile
    body: dict[str, Any]
    beside: Beside
    """Runs work whose time grows with the size of the body."""
    line: BatchLine | None = None
    """Set for a line of a batch."""


async def read_call(
    request: Request,
    *,
    is_paid: bool = False,
    has_native_path: bool = False,
    authorized: Principal | None = None,
) -> Call:
    """Authorize the caller, unless it is `authorized`, read the body, and choose the dialect.

    Raises an ApiError.

    Unless it `is_paid`, the request counts as unpaid; a paid request counts as unpaid only if it
    fails. A request that `has_native_path` is in one of llama.cpp's dialects. After this call,
    errors have the style of the client's dialect.
    """
    services, principal = services_of(request), authorized
    if principal is None:
        authorize = services[Authorizer].authorize
        principal = await authorize(request, Scope.COMPLETIONS, model_decides=True)
    else:
        principal.require_scope(Scope.COMPLETIONS)
    services[UnpaidRequests].admit(exchange_of(request.scope), principal, is_paid=is_paid)
    content = await services[BodyReader].read_counted(request, principal.tenant_id)
    beside = services[LargeWork].of(principal.tenant_id, size=len(content))
    body: dict[str, Any] = await beside(partial(parse_object, content))
    call = await _in_dialect(request, principal, body, beside)
    if authorized is None:
        require_header_of(request, call.profile)
    if has_native_path:
        require_native_paths(request, call.profile)
    return call


async def read_query(request: Request, body: dict[str, Any]) -> Call:
    """Like `read_call`, for GET requests whose parameters are in the query string, read as `body`.

    The request counts as unpaid. Raises an ApiError.
    """
    services = services_of(request)
    principal = await services[Authorizer].authorize(request, Scope.COMPLETIONS)
    services[UnpaidRequests].admit(exchange_of(request.scope), principal)
    beside = services[LargeWork].of(principal.tenant_id, size=0)
    call = await _in_dialect(request, principal, body, beside)
    require_header_of(request, call.profile)
    return call


async def _in_dialect(
    request: Request, principal: Principal, body: dict[str, Any], beside: Beside
) -> Call:
    context = context_of(request)
    header = request.headers.get(DIALECT_HEADER)
    profile = await profile_of(context, principal, body, header=header)
    exchange_of(request.scope).error_style = profile.error_style
    return Call(context, principal, profile, body, beside)


def require_native_paths(request: Request, profile: Profile) -> None:
    """Raise NotFoundError unless llama.cpp's own paths exist in a dialect."""
    if not profile.has_native_paths:
        raise NotFoundError(
            f"{route_hint(request)}"
            f"The route {request.method} {request.url.path} belongs to dialect llamacpp, but this "
            f"request is in dialect {profile.name}. Select llamacpp with the header "
            f"'{DIALECT_HEADER}', or as the dialect of the key, the tenant or the model."
        )
