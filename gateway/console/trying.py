"""Requests to the API with the rights of a session: of the playground, and of `/docs`."""

from typing import Final

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from starlette.types import Receive, Scope, Send
from typing_extensions import override

from gateway.console.routing import CSRF_HEADER, AnyVisitor, PageRoute, require_token
from gateway.console.visitor import Visitor
from gateway.http.exchange import exchange_of, is_anthropic
from gateway.records.errors import ErrorStyle, NotFoundError

HOME: Final = "/console/try"
_METHODS: Final = ["DELETE", "GET", "PATCH", "POST", "PUT"]


def try_router(route_class: type[PageRoute]) -> APIRouter:
    """Return the routes of one audience."""
    router = APIRouter(route_class=route_class, include_in_schema=False)
    router.add_api_route(HOME, get_session)
    router.add_api_route(f"{HOME}/{{path:path}}", try_request, methods=_METHODS)
    return router


async def get_session(visitor: AnyVisitor) -> Response:
    """Return who is logged in, and the token that requests need."""
    return JSONResponse({"name": visitor.name, "csrf": visitor.csrf})


async def try_request(request: Request, visitor: AnyVisitor) -> Response:
    """Pass a request on to the API; also GET needs the token of the session."""
    require_token(visitor.session, request.headers.get(CSRF_HEADER, ""))
    if request.url.path.startswith(f"{HOME}/console"):
        raise NotFoundError("The console is no part of the API.")
    return _Passed(request, visitor)


class _Passed(Response):
    """The response of the API. Sets the session of the request's exchange."""

    def __init__(self, request: Request, visitor: Visitor) -> None:
        super().__init__()
        self._request, self._visitor = request, visitor

    @override
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        inner = {
            **scope,
            "path": scope["path"].removeprefix(HOME),
            "raw_path": scope["raw_path"].removeprefix(HOME.encode()),
            "path_params": {},
            "state": {},
        }
        exchange = exchange_of(scope)
        exchange.session = self._visitor.principal
        exchange.sent_by(self._visitor.principal)
        exchange.error_style = ErrorStyle.ANTHROPIC if is_anthropic(inner) else None
        await self._request.app.router(inner, receive, send)
