"""Routes whose bodies pydantic reads, within limits of size and time."""

from collections.abc import Callable, Coroutine
from typing import Any, Final

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.types import Message, Receive, Scope
from typing_extensions import override

from gateway.dialects.wire import parse_object
from gateway.http.body import BodyReader
from gateway.http.services import services_of

MAX_BODY_BYTES: Final = 256 * 1024
"""Enough for the longest lists of a key; parsing this much does not block the event loop for
long."""


class BoundedRoute(APIRoute):
    """A route of the management API with a bounded body, which is a JSON object.

    Without it, FastAPI reads a body of any size before authentication, and takes NaN, lone
    surrogates and UTF-16.
    """

    @override
    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        if self.body_field is None:
            return handle
        is_required = self.body_field.field_info.is_required()

        async def handle_bounded(request: Request) -> Response:
            # The caller is not authenticated yet.
            sender = "" if request.client is None else request.client.host
            bodies = services_of(request)[BodyReader]
            content = await bodies.read(request, sender=sender, max_bytes=MAX_BODY_BYTES)
            parsed = parse_object(content) if content or is_required else {}

            async def receive() -> Message:
                return {"type": "http.request", "body": content, "more_body": False}

            return await handle(_ParsedRequest(request.scope, receive, parsed))

        return handle_bounded


class _ParsedRequest(Request):
    """A request whose body has been parsed."""

    def __init__(self, scope: Scope, receive: Receive, parsed: dict[str, Any]) -> None:
        super().__init__(scope, receive)
        self._parsed = parsed

    @override
    async def json(self) -> dict[str, Any]:
        return self._parsed
