"""Middleware for `x-request-id`: the client's id if it is well-formed, else a new one."""

import re
import secrets

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from contract import logs

_WELL_FORMED = re.compile(r"[A-Za-z0-9._-]{1,128}")


class RequestIdMiddleware:
    """Pure ASGI, so that a streamed chunk costs only one extra call."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request (ASGI)."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _WELL_FORMED.fullmatch(given) else f"req_{secrets.token_hex(12)}"

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        logs.request_id.set(request_id)
        await self._app(scope, receive, send_with_id)
