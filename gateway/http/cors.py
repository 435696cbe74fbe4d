"""CORS: whether web pages of other origins may call the API and read its responses."""

from collections.abc import Awaitable, Collection
from typing import Final

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.auth.authenticator import Authenticator
from gateway.http.error_handlers import error_style_of, to_response
from gateway.http.exchange import exchange_of
from gateway.http.services import services_of
from gateway.records.checks import allows_origin
from gateway.records.errors import ApiError

METHODS: Final = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")


class CorsMiddleware:
    """Adds Starlette's CORS headers for the origins of the deployment and of tenants.

    A preflight has no credential, so it succeeds for an origin that any tenant allows. Any other
    response has the headers if the deployment allows the origin, or the tenant of the request.
    For other origins, this class changes nothing.

    Args:
        app: The application.
        origins: Origins of the deployment.
        exposed: Response headers that a page may read.
    """

    def __init__(self, app: ASGIApp, origins: Collection[str], exposed: Collection[str]) -> None:
        self._app = app
        self._origins = origins
        # Runs only for an origin that `__call__` has found to be allowed.
        self._allowed = CORSMiddleware(
            app,
            allow_origin_regex=".*",
            allow_methods=METHODS,
            allow_headers=["*"],
            # Names for browsers without the wildcard.
            expose_headers=["*", *exposed],
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request (ASGI)."""
        headers = Headers(scope=scope) if scope["type"] == "http" else Headers()
        origin = headers.get("origin")
        if origin is None:
            await self._app(scope, receive, send)
        elif allows_origin(self._origins, origin):
            await self._allowed(scope, receive, send)
        elif scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
            await self._preflight(origin, scope, receive, send)
        else:

            def send_if_allowed(message: Message) -> Awaitable[None]:
                origins = exchange_of(scope).cors_origins
                if message["type"] == "http.response.start" and allows_origin(origins, origin):
                    return self._allowed.send(message, send, headers)
                return send(message)

            await self._app(scope, receive, send_if_allowed)

    async def _preflight(self, origin: str, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope)
        try:
            is_allowed = await services_of(request)[Authenticator].allows_origin(origin)
        except ApiError as error:
            await to_response(error, error_style_of(request))(scope, receive, send)
        else:
            await (self._allowed if is_allowed else self._app)(scope, receive, send)
