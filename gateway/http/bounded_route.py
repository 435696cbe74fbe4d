"""Routes whose bodies pydantic reads, within limits of size and time."""

from collections.abc import Callable, Coroutine
from typing import Any, Final

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.types import Message
from typing_extensions import override

from gateway.http.body import BodyReader
from gateway.http.services import services_of

MAX_BODY_BYTES: Final = 256 * 1024
"""Enough for the longest lists of a key; parsing this much does not block the event loop for
long."""


class BoundedRoute(APIRoute):
    """A route of the management API with a bounded body.

    Without it, FastAPI reads a body of any size before authentication.
    """

    @override
    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        if self.body_field is None:
            return handle

        async def handle_bounded(request: Request) -> Response:
            # The caller is not authenticated yet.
            sender = "" if request.client is None else request.client.host
            bodies = services_of(request)[BodyReader]
            content = await bodies.read(request, sender=sender, max_bytes=MAX_BODY_BYTES)

            async def receive() -> Message:
                return {"type": "http.request", "body": content, "more_body": False}

            return await handle(Request(request.scope, receive))

        return handle_bounded
