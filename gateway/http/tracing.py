"""Tracing span of an HTTP request."""

from collections.abc import Awaitable
from contextlib import AbstractContextManager
from functools import partial
from typing import Final

from opentelemetry.semconv.attributes.http_attributes import (
    HTTP_REQUEST_METHOD,
    HTTP_RESPONSE_STATUS_CODE,
    HTTP_ROUTE,
)
from opentelemetry.semconv.attributes.server_attributes import SERVER_ADDRESS, SERVER_PORT
from opentelemetry.semconv.attributes.url_attributes import URL_SCHEME
from opentelemetry.trace import Span, StatusCode
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from contract import logs
from contract.tracing import REQUEST_ID
from gateway import tracing
from gateway.http.draining import PROBES

_PROPAGATED: Final = frozenset({b"traceparent", b"tracestate"})


def traced(app: ASGIApp, scope: Scope) -> ASGIApp:
    """Return the application for a request: `app`, with a span if the request is traced.

    Health checks and metrics are not traced.
    """
    if scope["path"] in PROBES:
        return app
    headers = {
        name.decode(): value.decode("latin-1")
        for name, value in scope["headers"]
        if name in _PROPAGATED
    }
    started = tracing.request_span(scope["method"], headers, _described(scope))
    return app if started is tracing.NO_SPAN else partial(_serve, app, started)


async def _serve(
    app: ASGIApp,
    started: AbstractContextManager[Span],
    scope: Scope,
    receive: Receive,
    send: Send,
) -> None:
    with started as span:

        def note_and_send(message: Message) -> Awaitable[None]:
            if message["type"] == "http.response.start":
                status = message["status"]
                span.set_attribute(HTTP_RESPONSE_STATUS_CODE, status)
                if status >= 500:
                    span.set_status(StatusCode.ERROR)
            return send(message)

        try:
            await app(scope, receive, note_and_send)
        finally:
            if route := _route(scope):
                span.update_name(f"{scope['method']} {route}")
                span.set_attribute(HTTP_ROUTE, route)


def _described(scope: Scope) -> tracing.Attributes:
    host, port = scope.get("server") or ("", None)
    described: dict[str, str | bool | int | float] = {
        HTTP_REQUEST_METHOD: scope["method"],
        REQUEST_ID: logs.request_id.get(),
        SERVER_ADDRESS: host,
        URL_SCHEME: scope["scheme"],
    }
    if port is not None:
        described[SERVER_PORT] = port
    return described


def _route(scope: Scope) -> str:
    """Return the route template of a request; empty if no route matched.

    Never export the path itself: a client may have put a key into it.
    """
    if "endpoint" not in scope:
        return ""
    path: str = getattr(scope.get("route"), "path", "") or scope["path"]
    for name, value in scope.get("path_params", {}).items():
        path = path.replace(str(value), f"{{{name}}}", 1)
    return path
