"""`GET /`: where to continue, as a page for people and as JSON for programs."""

import asyncio
import base64
import hashlib
import re
from collections.abc import Callable, Mapping
from importlib.resources import files
from typing import Final

from fastapi import APIRouter, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse
from jinja2 import Environment

from gateway.http.services import services_of
from gateway.platform.concurrency.large_work import INLINE_SIZE, LargeWork
from gateway.platform.settings import Settings

_SOURCE: Final = files("gateway.http").joinpath("front_page.html").read_text()
_PAGE: Final = Environment(autoescape=True, trim_blocks=True).from_string(_SOURCE)
_STYLE: Final = _SOURCE.partition("<style>")[2].partition("</style>")[0]
_STYLE_HASH: Final = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
_HEADERS: Final = {
    # The page repeats the request's host.
    "cache-control": "no-store",
    "content-security-policy": f"default-src 'none'; style-src 'sha256-{_STYLE_HASH}'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
    "vary": "Accept",
    "x-content-type-options": "nosniff",
}

_PLAIN_HOST: Final = re.compile(r"([A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?")
"""Hosts without characters that a shell interprets."""
_CONSOLE: Final = "/console"
_STATUS: Final = "/status"
_CUSTOMERS_LINKS: Final = {
    _CONSOLE: "usage, keys and limits of your account",
    "/docs": "all endpoints and parameters",
    _STATUS: "availability of the models",
    "/health": "whether the gateway is ready",
    "/v1/models": "models that your key may use",
}
_CUSTOMERS_EXAMPLE: Final = """curl {url}/v1/completions \\
  -H "Authorization: Bearer $SLUICE_KEY" \\
  -H "Content-Type: application/json" \\
  -d '{{"model": "YOUR_MODEL", "prompt": "Once upon a time", "max_tokens": 40}}'"""
_OPERATORS_LINKS: Final = {
    _CONSOLE: "tenants, models and workers",
    "/docs": "the Admin API",
    "/readyz": "whether the gateway is ready",
    "/metrics": "metrics for Prometheus",
    "/admin/tenants": "all tenants",
}
_OPERATORS_EXAMPLE: Final = """curl {url}/admin/tenants \\
  -H "Authorization: Bearer $SLUICE_ADMIN_KEY\""""


def _router(known: Mapping[str, str], example: str) -> APIRouter:
    async def get_front_page(request: Request) -> Response:
        version, accepted = request.app.version, request.headers.get("accept", "")
        settings = services_of(request)[Settings]
        absent = {_CONSOLE: not settings.console, _STATUS: not settings.status_page}
        links = {path: text for path, text in known.items() if not absent.get(path)}
        if "application/json" in accepted and "text/html" not in accepted:
            paths = {path.rpartition("/")[2]: path for path in links}
            body = {"name": request.app.title, "version": version, **paths}
            return JSONResponse(body, headers=_HEADERS)
        host = request.headers.get("host", "")
        url = f"{request.url.scheme}://{host if _PLAIN_HOST.fullmatch(host) else 'HOST'}"
        page = _PAGE.render(
            title=request.app.title,
            version=version,
            links=links,
            example=example.format(url=url),
        )
        return HTMLResponse(page, headers=_HEADERS)

    router = APIRouter()
    router.add_route("/", get_front_page, methods=["GET"])
    return router


customer_router: Final = _router(_CUSTOMERS_LINKS, _CUSTOMERS_EXAMPLE)
operator_router: Final = _router(_OPERATORS_LINKS, _OPERATORS_EXAMPLE)


class FixedPage:
    """A page that is made in a thread when it is first requested."""

    def __init__(self, make: Callable[[], bytes], *, media_type: str) -> None:
        self._make = make
        self._media_type = media_type
        self._content = b""
        self._tag = ""
        self._lock = asyncio.Lock()

    async def respond(self, request: Request) -> Response:
        """Return the page, or 304 if the request has its tag."""
        if not self._content:
            async with self._lock:
                if not self._content:
                    large_work = services_of(request)[LargeWork]
                    beside = large_work.of("", size=INLINE_SIZE + 1)
                    self._content = await beside(self._make)
                    self._tag = f'"{hashlib.sha256(self._content).hexdigest()[:32]}"'
        headers = {"etag": self._tag, "cache-control": "no-cache"}
        if self._tag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(self._content, media_type=self._media_type, headers=headers)
