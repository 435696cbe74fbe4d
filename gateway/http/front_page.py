"""`GET /`: where to continue, as a page for people and as JSON for programs."""

import asyncio
import hashlib
import mimetypes
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from fastapi import APIRouter, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse

from gateway.dialects.endpoint import CLASSIFY, COMPLETIONS, EMBEDDINGS, served_endpoints
from gateway.http.public_pages import HEADERS, render
from gateway.http.services import services_of
from gateway.models.catalogue import Catalogue, ServedModel
from gateway.platform.concurrency.large_work import INLINE_SIZE, LargeWork
from gateway.platform.settings import Settings
from gateway.records.errors import NotFoundError, shown

# The page repeats the request's host.
_HEADERS: Final = {**HEADERS, "cache-control": "no-store", "vary": "Accept"}

_PLAIN_HOST: Final = re.compile(r"([A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?")
"""Hosts without characters that a shell interprets."""
_PLAIN_MODEL: Final = re.compile(r"[\w./:-]+", re.ASCII)
_CONSOLE: Final = "/console"
_STATUS: Final = "/status"
_CUSTOMERS_LINKS: Final = {
    "/docs": "all endpoints and parameters, with examples",
    _CONSOLE: "usage, keys and limits of your account, and a playground",
    _STATUS: "availability of the models",
    "/health": "whether the gateway is ready",
    "/v1/models": "models that your key may use",
}
_OPERATORS_LINKS: Final = {
    _CONSOLE: "tenants, models and workers",
    "/docs": "the Admin API",
    "/readyz": "whether the gateway is ready",
    "/metrics": "metrics for Prometheus",
    "/admin/tenants": "all tenants",
}
_OPERATORS_EXAMPLE: Final = """curl {url}/admin/tenants \\
  -H "Authorization: Bearer $SLUICE_ADMIN_KEY\""""
_EXAMPLES: Final = {
    COMPLETIONS.path: '"prompt": "Once upon a time", "max_tokens": 40',
    EMBEDDINGS.path: '"input": "Once upon a time"',
    CLASSIFY.path: '"input": "Once upon a time"',
}
"""Members of the body of a first request, by the path."""
_CURL: Final = """export SLUICE_KEY=sk-...
curl {url}{path} \\
  -H "Authorization: Bearer $SLUICE_KEY" \\
  -H "Content-Type: application/json" \\
  -d '{{"model": "{model}", {members}}}'"""


def _customers(url: str, models: Sequence[ServedModel] | None) -> dict[str, str]:
    """Return what the page says to customers; `models` is None if it must not name any."""
    ready = [each for each in models or () if each.is_ready]
    found = (
        (path, each.card.model)
        for path in _EXAMPLES
        for each in ready
        if path in served_endpoints(each.card).values() and _PLAIN_MODEL.fullmatch(each.card.model)
    )
    path, model = next(found, (COMPLETIONS.path, "YOUR_MODEL"))
    count = "All" if len(ready) == len(models or ()) else f"{len(ready)} of {len(models or ())}"
    state = f"{count} models are ready." if models else ""
    return {
        "text": "An API for completions of open models, compatible with OpenAI's clients.",
        "state": state,
        "first": "Replace sk-... by your key"
        + (f", and {model} by a model of /v1/models:" if model == "YOUR_MODEL" else ":"),
        "example": _CURL.format(url=url, path=path, model=model, members=_EXAMPLES[path]),
    }


def _operators(url: str, _models: Sequence[ServedModel] | None) -> dict[str, str]:
    return {
        "text": "The Admin API, metrics and console of this deployment. Keep this port private.",
        "state": "",
        "first": "Use a key with the scope admin:",
        "example": _OPERATORS_EXAMPLE.format(url=url),
    }


def _router(
    known: Mapping[str, str],
    describe: Callable[[str, Sequence[ServedModel] | None], dict[str, str]],
) -> APIRouter:
    async def get_front_page(request: Request) -> Response:
        version, accepted = request.app.version, request.headers.get("accept", "")
        services = services_of(request)
        settings = services[Settings]
        absent = {_CONSOLE: not settings.console, _STATUS: not settings.status_page}
        links = {path: text for path, text in known.items() if not absent.get(path)}
        if "application/json" in accepted and "text/html" not in accepted:
            paths = {path.rpartition("/")[2]: path for path in links}
            body = {"name": request.app.title, "version": version, **paths}
            return JSONResponse(body, headers=_HEADERS)
        host = request.headers.get("host", "")
        plain = f"{request.url.scheme}://{host if _PLAIN_HOST.fullmatch(host) else 'HOST'}"
        # The status page names the models, so this page may, too.
        models = services[Catalogue].models if settings.status_page else None
        page = render(
            "front.html",
            title=request.app.title,
            version=version,
            links=links,
            **describe(plain, models),
        )
        return HTMLResponse(page, headers=_HEADERS)

    router = APIRouter()
    router.add_route("/", get_front_page, methods=["GET"])
    return router


customer_router: Final = _router(_CUSTOMERS_LINKS, _customers)
operator_router: Final = _router(_OPERATORS_LINKS, _operators)


class FixedPages:
    """Pages that are made together in a thread when one of them is first requested."""

    def __init__(
        self,
        make: Callable[[], Mapping[str, bytes]],
        *,
        headers: Mapping[str, str] = HEADERS,
    ) -> None:
        """`make` returns the pages by their paths, which without a suffix are HTML."""
        self._make = make
        self._headers = headers
        self._contents: Mapping[str, bytes] = {}
        self._lock = asyncio.Lock()

    async def respond(self, request: Request) -> Response:
        """Return the page, or 304 if the request has its tag. Raises NotFoundError."""
        if not self._contents:
            async with self._lock:
                if not self._contents:
                    large_work = services_of(request)[LargeWork]
                    beside = large_work.of("", size=INLINE_SIZE + 1)
                    self._contents = await beside(self._make)
        path = request.url.path
        if (content := self._contents.get(path)) is None:
            raise NotFoundError(f"There is no page {shown(path)}.")
        tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
        headers = {**self._headers, "etag": tag, "cache-control": "no-cache"}
        if tag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        media_type = mimetypes.guess_type(path)[0] or "text/html"
        return Response(content, media_type=media_type, headers=headers)
