"""Drain a gateway: report not ready, serve for a while longer, then reject new requests.

Running requests continue; `gateway.process.server.serve` limits how long.
"""

import signal
from typing import Final

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.http.error_handlers import error_style_of, to_response
from gateway.records.errors import GatewayStoppingError

PROBES: Final = frozenset(
    {"/healthz", "/readyz", "/health", "/v1/health", "/ping", "/load", "/version", "/metrics"}
)
"""Paths that respond until the end, so that operators can observe the drain."""
RETRY_AFTER_SECONDS: Final = 1.0


class Draining:
    """Whether this process is shutting down, and its progress."""

    def __init__(self) -> None:
        self.is_draining = False
        """The process is no longer ready, but still serves new requests."""
        self.is_closed = False
        """The process rejects new requests."""
        self.has_failed = False
        """The process shuts down because of an internal failure."""

    def fail(self) -> None:
        """Shut the process down without waiting for running requests, which would not end."""
        self.has_failed = True
        for _ in range(2):  # The second signal skips the wait.
            signal.raise_signal(signal.SIGTERM)


class DrainMiddleware:
    """Closes connections after their responses during a drain; otherwise adds no overhead."""

    def __init__(self, app: ASGIApp, drain: Draining) -> None:
        self._app = app
        self._drain = drain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request (ASGI)."""
        if scope["type"] != "http" or not self._drain.is_draining:
            await self._app(scope, receive, send)
            return

        async def send_and_close(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["connection"] = "close"
            await send(message)

        if self._drain.is_closed and scope["path"] not in PROBES:
            error = GatewayStoppingError(
                "The gateway is shutting down. Retry the request.",
                retry_after_seconds=RETRY_AFTER_SECONDS,
            )
            refusal = to_response(error, error_style_of(Request(scope)))
            await refusal(scope, receive, send_and_close)
        else:
            await self._app(scope, receive, send_and_close)
