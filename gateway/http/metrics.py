"""HTTP metrics: count and time every request, by its route template."""

import asyncio
import time
from collections.abc import Awaitable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway import telemetry
from gateway.heartbeat import served


class HttpMetricsMiddleware:
    """The outermost middleware. Adds one call to each chunk, and no task or coroutine."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request (ASGI)."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.perf_counter()
        status = 500  # Starlette's status for an exception, outside of this middleware.

        def note_and_send(message: Message) -> Awaitable[None]:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            return send(message)

        if (task := asyncio.current_task()) is not None:
            served[task] = scope
        try:
            await self._app(scope, receive, note_and_send)
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
