"""How a gateway leaves: it says so, serves on for a while, and refuses what comes after that.

What is running when it leaves goes on; `gateway.serve` bounds how long.
"""

import signal
from typing import Final

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.api.error_handlers import error_style_of, to_response
from gateway.errors import GatewayStoppingError

PROBES: Final = frozenset({"/healthz", "/readyz", "/metrics"})
"""Answered to the last, so that whoever looks after this process sees what it does."""
RETRY_AFTER_SECONDS: Final = 1.0


class Drain:
    """Whether this process is leaving, and how far it has got."""

    def __init__(self) -> None:
        self.is_leaving = False
        """It is not ready any more, but serves what comes all the same."""
        self.is_closed = False
        """It refuses new requests."""
        self.has_failed = False
        """It leaves because it cannot go on."""

    def fail(self) -> None:
        """Have the process leave without waiting for what runs, which would not end by itself."""
        self.has_failed = True
        for _ in range(2):  # The second signal cuts the waiting short.
            signal.raise_signal(signal.SIGTERM)


class DrainMiddleware:
    """Closes connections behind their answers while the gateway leaves; costs a chunk nothing until then."""

    def __init__(self, app: ASGIApp, drain: Drain) -> None:
        self._app = app
        self._drain = drain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request (ASGI)."""
        if scope["type"] != "http" or not self._drain.is_leaving:
            await self._app(scope, receive, send)
            return

        async def send_and_close(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["connection"] = "close"
            await send(message)

        if self._drain.is_closed and scope["path"] not in PROBES:
            error = GatewayStoppingError(
                "This gateway is stopping; another one will answer.",
                retry_after_seconds=RETRY_AFTER_SECONDS,
            )
            refusal = to_response(error, error_style_of(Request(scope)))
            await refusal(scope, receive, send_and_close)
        else:
            await self._app(scope, receive, send_and_close)
