"""Render pages: templates, formats of values, and security headers."""

import re
import secrets
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, Final
from urllib.parse import quote

from fastapi import Request
from fastapi.responses import HTMLResponse
from jinja2 import Environment, PackageLoader, StrictUndefined

from gateway.console import formats
from gateway.console.assets import PATHS
from gateway.console.forms import concerns
from gateway.console.limit_fields import LABELS, grouped, shown_limit
from gateway.console.navigation import navigation
from gateway.console.tables import Field, Group
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
    "number": formats.number,
    "short": formats.shortened,
    "size": formats.size,
    "time": formats.show_time,
    "unix": formats.unix,
    "until": formats.until,
}
_environment.globals |= {
    "assets": PATHS,
    "concerns": concerns,
    "grouped": grouped,
    "limit_labels": LABELS,
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
    headers = {**SECURITY_HEADERS, "content-security-policy": policy(nonce)}
    return HTMLResponse(content, status_code=status, headers=headers)


def confirmation(
    request: Request,
    *,
    title: str,
    button: str,
    text: str = "",
    warning: str = "",
    facts: Mapping[str, str] = MappingProxyType({}),
    fields: Mapping[str, str] = MappingProxyType({}),
    options: Mapping[str, str] = MappingProxyType({}),
    back: str = "",
) -> HTMLResponse:
    """Return a page that asks before it sends a form with `fields` to its own address.

    `options` are the labels of boxes that the visitor may tick, by the names of their fields.
    Without the confirmation, the visitor returns to `back`, by default the page above. Raises the
    error of the form that was sent.
    """
    if (error := getattr(request.state, "error", None)) is not None:
        raise error
    return page(
        request,
        "form.html",
        title=title,
        text=text,
        warning=warning,
        facts=facts,
        action=_address(request),
        button=button,
        is_danger=True,
        back=back or _above(request),
        hidden=fields,
        fields=[Field(name, label, type="checkbox") for name, label in options.items()],
        groups=(),
        form=defaultdict(str),
    )


def form_page(
    request: Request,
    *,
    title: str,
    fields: Sequence[Field],
    form: Mapping[str, str],
    button: str,
    text: str = "",
    groups: Sequence[Group] = (),
    hidden: Mapping[str, str] = MappingProxyType({}),
    error: ApiError | None = None,
) -> HTMLResponse:
    """Return a page with a form, filled in with `form`, that POSTs to its own address.

    It also sends the `hidden` fields.
    """
    return page(
        request,
        "form.html",
        title=title,
        fields=fields,
        form=defaultdict(str, form),
        action=_address(request),
        button=button,
        back=_above(request),
        text=text,
        groups=groups,
        hidden=hidden,
        error=error,
    )


def _address(request: Request) -> str:
    query = f"?{request.url.query}" if request.url.query else ""
    return f"{quote(request.url.path)}{query}"


def _above(request: Request) -> str:
    return quote(request.url.path).rpartition("/")[0]


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
