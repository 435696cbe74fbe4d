"""Error handlers: convert every failure to a response in the dialect's error style."""

import logging

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse
from opentelemetry.semconv.attributes.error_attributes import ERROR_TYPE
from redis.exceptions import RedisError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Match

from common import logs
from contract.dialect import Dialect
from gateway.dialects.endpoint import RESPONSES
from gateway.dialects.profile import PROFILES
from gateway.dialects.profile_choice import DIALECT_HEADER, dialect_of
from gateway.dialects.responses.failures import failed_stream
from gateway.http.allowances import UnpaidRequests
from gateway.http.exchange import anthropic_id, exchange_of
from gateway.http.public_pages import HEADERS, render
from gateway.http.services import Services, services_of
from gateway.platform import tracing
from gateway.platform.settings import Settings
from gateway.platform.store_errors import cause_of
from gateway.records.errors import (
    ApiError,
    BadRequestError,
    ErrorStyle,
    InternalError,
    InvalidParameterError,
    MethodNotAllowedError,
    MissingParameterError,
    NotFoundError,
    PayloadTooLargeError,
    StoreUnavailableError,
    queue_unavailable,
    shown,
)

logger = logging.getLogger(__name__)

_FAULTS_OF_CLIENTS = (BadRequestError, NotFoundError, PayloadTooLargeError)
"""Failures that count against a key. For limit and payment errors, only large bodies count."""

EXPECTED_ERRORS = (ApiError, HTTPException, RequestValidationError, RedisError, ClientDisconnect)
"""Starlette reports exceptions as bugs unless a handler is registered for their class."""

CLIENT_CLOSED_REQUEST = 499
"""Status in logs and metrics when the client has disconnected; no client receives it."""

_VERSION = "/v1"


def install_error_handlers(app: FastAPI) -> None:
    """Install handlers that convert every exception to an API error response."""
    for handled in (*EXPECTED_ERRORS, Exception):
        app.add_exception_handler(handled, on_exception)


def error_style_of(request: Request) -> ErrorStyle:
    """Return the error style of a request.

    After the route has chosen the request's profile, it sets the exchange's `error_style`. Before
    that, or without a route, the header's dialect decides, else the gateway's default dialect.
    """
    style = exchange_of(request.scope).error_style
    if style is not None:
        return style
    named = dialect_of(request.headers.get(DIALECT_HEADER, ""))
    return PROFILES[named or _default_dialect(request)].error_style


def to_response(error: ApiError, style: ErrorStyle = ErrorStyle.OPENAI) -> Response:
    """Render an error as the response to the current request."""
    tracing.note({ERROR_TYPE: error.code})
    content = error.content(style)
    if style is ErrorStyle.ANTHROPIC:
        body = {**error.body(style), "request_id": anthropic_id(logs.request_id.get())}
        content = msgspec.json.encode(body)
    return Response(
        content,
        status_code=error.status_for(style),
        headers={**error.headers(), **error.link()},
        media_type="application/json",
    )


def _default_dialect(request: Request) -> Dialect:
    # There are no services before the lifespan starts.
    services: Services | None = getattr(request.app.state, "services", None)
    return Dialect.OPENAI if services is None else services[Settings].default_dialect


async def on_exception(request: Request, error: Exception) -> Response:
    """Return the response to an exception that a route has raised."""
    match error:
        case ApiError():
            return _on_api_error(request, error)
        case HTTPException():
            return _on_http_exception(request, error)
        case RequestValidationError():
            return _on_invalid_request(request, error)
        case RedisError():
            logger.warning("a request failed with an error of Redis: %s", cause_of(error))
            return to_response(queue_unavailable(), error_style_of(request))
        case ClientDisconnect():
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        case _:
            return to_response(InternalError(), error_style_of(request))


def _on_api_error(request: Request, error: ApiError) -> Response:
    if isinstance(error, StoreUnavailableError) and error.detail:
        logger.warning("a request failed: %s", error.detail)
    exchange = exchange_of(request.scope)
    if exchange.caller and error.status < InternalError.status:
        is_fault = isinstance(error, _FAULTS_OF_CLIENTS)
        services_of(request)[UnpaidRequests].count(exchange, is_fault=is_fault)
    if exchange.stream_model is not None:
        events = failed_stream(error, RESPONSES.new_id(), exchange.stream_model)
        if events is not None:
            tracing.note({ERROR_TYPE: error.code})
            return Response(
                events, headers={**error.headers(), **error.link()}, media_type="text/event-stream"
            )
    return to_response(error, error_style_of(request))


def _on_http_exception(request: Request, error: HTTPException) -> Response:
    style = error_style_of(request)
    path, method = request.url.path, request.method
    if error.status_code == NotFoundError.status:
        message = f"{route_hint(request)}The route {method} {path[:200]} does not exist."
        if method == "GET" and wants_page(request):
            page = render("missing.html", message=message)
            return HTMLResponse(page, status_code=error.status_code, headers=HEADERS)
        return to_response(NotFoundError(message), style)
    if error.status_code == MethodNotAllowedError.status:
        refusal = MethodNotAllowedError(f"{method} is not allowed on {path[:200]}.")
        response = to_response(refusal, style)
        response.headers.update(error.headers or {})
        return response
    return to_response(BadRequestError("The request is malformed."), style)


def _on_invalid_request(request: Request, error: RequestValidationError) -> Response:
    problem = error.errors()[0]
    name = ".".join(str(part) for part in problem["loc"][1:])
    if problem["type"] == "missing" and name:
        refusal: ApiError = MissingParameterError(name)
    else:
        reason = problem["msg"].removeprefix("Value error, ")
        refusal = InvalidParameterError(
            f"'{name or 'body'}': {reason}. Given: {shown(problem.get('input'))}.",
            param=name or None,
        )
    return to_response(refusal, error_style_of(request))


def wants_page(request: Request) -> bool:
    """Whether a browser asks for a page that a person reads."""
    return "text/html" in request.headers.get("accept", "")


def route_hint(request: Request) -> str:
    """Return a sentence that names an existing route, or "" if none is similar."""
    method, path = request.method, request.url.path.rstrip("/")
    version = max(path.rfind(f"{_VERSION}/"), 0)
    for meant in (_VERSION + path, path[version:]):
        scope = {**request.scope, "path": meant}
        is_other = meant != request.url.path
        if is_other and any(r.matches(scope)[0] is Match.FULL for r in request.app.routes):
            return f"Use {method} {meant[:200]}. "
    return ""
