"""The front middleware: request ids, HTTP metrics, and a direct way to the generation routes.

Each middleware costs every request a coroutine, and every message of a response a call. So this one
does what all requests need, and other middleware runs only for the requests that need it.
"""

import asyncio
import os
import re
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any, Final

from fastapi import FastAPI
from opentelemetry.semconv.attributes.http_attributes import (
    HTTP_REQUEST_METHOD,
    HTTP_RESPONSE_STATUS_CODE,
    HTTP_ROUTE,
)
from opentelemetry.semconv.attributes.server_attributes import SERVER_ADDRESS, SERVER_PORT
from opentelemetry.semconv.attributes.url_attributes import URL_SCHEME
from opentelemetry.trace import Span, StatusCode
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from typing_extensions import override

from common import logs
from common.not_none import not_none
from common.tracing import REQUEST_ID
from gateway.auth.authenticator import Authenticator
from gateway.http.allowances import network_of
from gateway.http.authorization import credential_of
from gateway.http.connection import connection_of
from gateway.http.draining import PROBES, Draining
from gateway.http.error_handlers import EXPECTED_ERRORS, on_exception
from gateway.http.exchange import anthropic_id, is_anthropic
from gateway.http.services import Services
from gateway.platform import telemetry, tracing
from gateway.platform.concurrency.fair_turns import LoopTurns
from gateway.records.errors import TenantQueueFullError

_PROPAGATED: Final = frozenset({b"traceparent", b"tracestate"})
_FAILED: Final = 500
_VERSION: Final = "/v1/"
_IDS: Final = (b"x-request-id", b"x-correlation-id")
_WELL_FORMED: Final = re.compile(rb"[A-Za-z0-9._-]{1,128}")

served: dict["asyncio.Task[Any]", Mapping[str, Any]] = {}
"""ASGI scopes of the requests in progress, by their tasks."""


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
    started = tracing.request_span(scope["method"], headers)
    return app if started is tracing.NO_SPAN else partial(_serve_traced, app, started)


async def _serve_traced(
    app: ASGIApp,
    started: AbstractContextManager[Span],
    scope: Scope,
    receive: Receive,
    send: Send,
) -> None:
    with started as span:
        span.set_attributes(_described(scope))

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
            if route := _template(scope):
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


def _template(scope: Scope) -> str:
    """Return the route template of a request; empty if no route matched.

    Never export the path itself: a client may have put a key into it.
    """
    if "endpoint" not in scope:
        return ""
    path: str = getattr(scope.get("route"), "path", "") or scope["path"]
    for name, value in scope.get("path_params", {}).items():
        path = path.replace(str(value), f"{{{name}}}", 1)
    return path


@dataclass(eq=False)
class FrontMiddleware:
    """Counts and times each request by its route template, and sets `x-request-id`.

    The id is the client's if it is well-formed, else a new one.
    """

    app: ASGIApp
    """The middleware and routes of Starlette."""
    _: KW_ONLY
    application: FastAPI
    """The application that requests refer to."""
    direct: Iterable[BaseRoute] = ()
    """Routes with fixed paths whose POST requests do not pass the application's router."""
    wrap: Callable[[ASGIApp], ASGIApp]
    """Returns an application with the middleware for requests with an Origin header and for those
    during a drain."""
    traces: bool = False
    """Whether requests are traced, if they are sampled."""
    drain: Draining
    """The drain of this process."""

    def __post_init__(self) -> None:
        self._direct = {each.path: each for each in self.direct if isinstance(each, Route)}
        self._wrapped = self.wrap(self._dispatch)

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Serve a request (ASGI). Whatever its path, it shares the event loop with others."""
        scope["app"] = self.application
        if scope["type"] != "http":
            return self.app(scope, receive, send)
        path: str = scope["path"]
        if path[-1:] == "/" or path[:2] == "//":
            # Clients join a base URL and a path with one slash too many.
            meant = f"/{path.strip('/')}"
            scope["path"] = meant if meant.startswith(_VERSION) else path
        services: Services = self.application.state.services
        turns = services[LoopTurns]
        return turns.run(self._serve(scope, receive, send, turns))

    async def _serve(self, scope: Scope, receive: Receive, send: Send, turns: LoopTurns) -> None:
        began = time.perf_counter()
        status = 0  # Until the response starts.
        ids, has_origin = _read_headers(scope)

        def note_and_send(message: Message) -> Awaitable[None]:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], *ids]
            return send(message)

        task = not_none(asyncio.current_task())
        served[task] = scope
        logs.request_id.set(ids[0][1].decode())
        plain: ASGIApp = self._dispatch
        app = plain
        if has_origin or self.drain.is_draining:
            app = self._wrapped
        if self.traces:
            app = traced(app, scope)
        route = self._route(scope) if app is plain else None
        try:
            await turns.enter(self._caller(scope, turns))
            if route is None:
                await app(scope, receive, note_and_send)
            else:
                response = await _respond(route, scope, receive)
                if _send_whole(scope, response, ids):
                    status = response.status_code
                else:
                    await response(scope, receive, note_and_send)
        except Exception as error:
            if not status:
                response = await on_exception(Request(scope), error)
                await response(scope, receive, note_and_send)
            if not isinstance(error, TenantQueueFullError):
                raise  # The server logs it.
        finally:
            seconds = time.perf_counter() - began
            del served[task]
            telemetry.http_responded(
                telemetry.route_label(scope),
                scope["method"],
                status or _FAILED,
                seconds=seconds,
            )

    async def _dispatch(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = self._route(scope)
        if route is None:
            await self.app(scope, receive, send)
        else:
            response = await _respond(route, scope, receive)
            await response(scope, receive, send)

    def _route(self, scope: Scope) -> Route | None:
        """Return the direct route of a request, if it has one."""
        return self._direct.get(scope["path"]) if scope["method"] == "POST" else None

    def _caller(self, scope: Scope, turns: LoopTurns) -> str:
        """Return who uses the loop: the client's network, until `authorize` knows the tenant.

        The tenants of a network that uses the loop too much need not wait with it.
        """
        network = network_of(scope["client"][0] if scope["client"] else "")
        if turns.is_over(network):
            authenticator = self.application.state.services[Authenticator]
            credential = credential_of(Headers(scope=scope))
            return authenticator.cached_tenant(credential) or network
        return network


def _read_headers(scope: Scope) -> tuple[list[tuple[bytes, bytes]], bool]:
    """Return the headers with the id of a request, and whether the request has an Origin.

    Without `x-request-id`, `x-correlation-id` is the id, and is returned as it came.
    """
    given, has_origin = dict[bytes, bytes](), False
    for name, value in scope["headers"]:
        if name in _IDS and name not in given and _WELL_FORMED.fullmatch(value):
            given[name] = value
        elif name == b"origin":
            has_origin = True
    request_id = next(iter([given[name] for name in _IDS if name in given]), b"")
    given[_IDS[0]] = request_id or b"req_%b" % os.urandom(12).hex().encode()
    ids: list[tuple[bytes, bytes]] = [(name, given[name]) for name in _IDS if name in given]
    if is_anthropic(scope):
        ids.append((b"request-id", anthropic_id(given[_IDS[0]].decode()).encode()))
    return ids, has_origin


async def _respond(route: Route, scope: Scope, receive: Receive) -> Response:
    """Do what Starlette's router, its routes and its exception middleware do."""
    scope.update(route=route, endpoint=route.endpoint, path_params={})
    request = _Request(scope, receive)
    try:
        response: Response = await route.endpoint(request)
    except EXPECTED_ERRORS as error:
        response = await on_exception(request, error)
    return response


def _send_whole(scope: Scope, response: Response, ids: list[tuple[bytes, bytes]]) -> bool:
    """Send a response with a body in one write; return False if that is impossible."""
    connection = connection_of(scope) if type(response) is Response else None
    if connection is None:
        return False
    headers = [*response.raw_headers, *ids]
    return connection.respond(response.status_code, headers, bytes(response.body))


class _Request(Request):
    """A request whose headers are in a dictionary."""

    # Attributes, which are read many times, instead of Starlette's properties.
    app: Any = None
    headers: Headers = Headers()

    def __init__(self, scope: Scope, receive: Receive) -> None:
        super().__init__(scope, receive)
        self.app = scope["app"]
        self.headers = _Headers(raw=scope["headers"])


class _Headers(Headers):
    def __init__(self, raw: list[tuple[bytes, bytes]]) -> None:
        super().__init__(raw=raw)
        # The first of several values counts.
        self._values = {
            str(name, "latin-1"): str(value, "latin-1") for name, value in reversed(raw)
        }

    @override
    def __getitem__(self, key: str) -> str:
        return self._values[key.lower()]

    @override
    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and key.lower() in self._values

    @override
    def get(self, key: str, default: Any = None) -> Any:
        return self._values.get(key.lower(), default)
