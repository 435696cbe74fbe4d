"""Render pages: templates, formats of values, and security headers."""

import re
import secrets
from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, Final
from urllib.parse import quote

from fastapi import Request
from fastapi.responses import HTMLResponse
from jinja2 import Environment, PackageLoader, StrictUndefined

from gateway.console import formats
from gateway.console.assets import PATHS
from gateway.console.forms import concerns, named
from gateway.console.limit_fields import LABELS, grouped, shown_limit
from gateway.console.navigation import navigation
from gateway.http.services import services_of
from gateway.platform.settings import Settings
from gateway.records.errors import ApiError
from gateway.records.money import show_dollars

SECURITY_HEADERS: Final[Mapping[str, str]] = {
    "cache-control": "no-store",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=(), payment=()",
    "referrer-policy": "same-origin",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}
"""Headers of every response of the console except its files."""
_PLACEHOLDER: Final = re.compile(r"\{\w+\}")


_environment: Final = Environment(
    loader=PackageLoader("gateway.console", "html"),
    autoescape=True,
    extensions=["jinja2.ext.do"],
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    auto_reload=False,
)
_environment.filters |= {
    "cents": formats.cents,
    "dollars": show_dollars,
    "duration": formats.duration,
    "moment": formats.moment,
    "number": formats.number,
    "short": formats.shortened,
    "size": formats.size,
    "time": formats.show_time,
    "until": formats.until,
}
_environment.globals |= {
    "assets": PATHS,
    "concerns": concerns,
    "grouped": grouped,
    "limit_labels": LABELS,
    "named": named,
    "navigation": navigation,
    "padding": formats.padding,
    "share": formats.share,
    "shown_limit": shown_limit,
}
# Parts of every page: to compile these and a page at once would hold the event loop for too long.
for _name in ("base.html", "parts.html"):
    _environment.get_template(_name)


def render(template: str, /, **values: Any) -> str:
    """Return the content of a page."""
    return _environment.get_template(template).render(**values)


def page(
    request: Request,
    template: str,
    /,
    *,
    error: ApiError | None = None,
    status: int | None = None,
    notices: Mapping[str, str] = MappingProxyType({}),
    **values: Any,
) -> HTMLResponse:
    """Return a page, by default with the status of the `error` that it shows.

    Templates see the request's visitor, if it has one, the error, and `values`. Without an error,
    their `notice` is the one of `notices` that the query's `done` names: what was done before.
    """
    nonce, settings = secrets.token_urlsafe(16), services_of(request)[Settings]
    error = getattr(request.state, "error", error)
    content = render(
        template,
        request=request,
        path=request.url.path,
        nonce=nonce,
        outside=partial(outside, settings),
        has_status_page=settings.status_page,
        visitor=getattr(request.state, "visitor", None),
        error=error,
        notice=notices.get(request.query_params.get("done", "")) if error is None else None,
        **values,
    )
    if status is None:
        status = 200 if error is None else error.status
    headers = {} if error is None else {**error.headers()}
    headers |= {**SECURITY_HEADERS, "content-security-policy": policy(nonce)}
    return HTMLResponse(content, status_code=status, headers=headers)


def outside(settings: Settings, name: str, value: str) -> str | None:
    """Return a link of an operator to another system; None if its setting is empty."""
    template: str | None = getattr(settings, name)
    return template and _PLACEHOLDER.sub(lambda _match: quote(value, safe=""), template)


def policy(nonce: str | None) -> str:
    """Return the content security policy of a page; without a nonce it allows no scripts."""
    scripts = "'none'" if nonce is None else f"'nonce-{nonce}'"
    return (
        f"default-src 'none'; script-src {scripts}; style-src 'self'; img-src 'self' data:; "
        "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    )
