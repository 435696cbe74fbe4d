"""The front middleware: request ids, HTTP metrics, and a direct way to the generation routes.

Each middleware costs every request a coroutine, and every message of a response a call. So this one
does what all requests need, and other middleware runs only for the requests that need it.
"""

import asyncio
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Final

from starlette.requests import Request
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from contract import logs
from gateway import telemetry
from gateway.heartbeat import served
from gateway.http.draining import Drain
from gateway.http.error_handlers import EXPECTED_ERRORS, on_exception
from gateway.http.tracing import traced

_Sending = Awaitable[None]
_WELL_FORMED: Final = re.compile(rb"[A-Za-z0-9._-]{1,128}")


class FrontMiddleware:
    """Counts and times each request by its route template, and sets `x-request-id`.

    The id is the client's if it is well-formed, else a new one.

    Args:
        app: The application.
        direct: Routes with fixed paths whose POST requests do not pass the application's router.
        wrap: Returns an application with the middleware for requests with an Origin header and for
            those during a drain.
        traces: Whether requests are traced, if they are sampled.
        drain: The drain of this process.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        direct: Iterable[BaseRoute] = (),
        wrap: Callable[[ASGIApp], ASGIApp],
        traces: bool = False,
        drain: Drain,
    ) -> None:
        self._app = app
        self._direct = {route.path: route for route in direct if isinstance(route, Route)}
        self._wrapped = wrap(self._dispatch)
        self._traces = traces
        self._drain = drain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request (ASGI)."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.perf_counter()
        status = 500  # Starlette's status for an exception, outside of this middleware.
        wraps = self._drain.is_draining
        request_id = b""
        for name, value in scope["headers"]:
            if name == b"x-request-id" and not request_id:
                request_id = value
            elif name == b"origin":
                wraps = True
        if not _WELL_FORMED.fullmatch(request_id):
            request_id = b"req_%b" % secrets.token_hex(12).encode()

        def note_and_send(message: Message) -> _Sending:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", request_id)]
            return send(message)

        if (task := asyncio.current_task()) is not None:
            served[task] = scope
        logs.request_id.set(request_id.decode())
        app = self._wrapped if wraps else self._dispatch
        try:
            await (traced(app, scope) if self._traces else app)(scope, receive, note_and_send)
        finally:
            seconds = time.perf_counter() - began
            if task is not None:
                served.pop(task, None)
            telemetry.http_responded(
                telemetry.route_label(scope),
                telemetry.method_label(scope["method"]),
                status,
                seconds=seconds,
            )

    async def _dispatch(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = self._direct.get(scope["path"])
        if route is None or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        # What Starlette's router, its routes and its exception middleware do.
        scope.update(route=route, endpoint=route.endpoint, path_params={})
        request = Request(scope, receive, send)
        try:
            response = await route.endpoint(request)
        except EXPECTED_ERRORS as error:
            response = await on_exception(request, error)
        await response(scope, receive, send)
