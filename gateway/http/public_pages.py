"""Pages that everybody may read: templates with one style, without scripts."""

import base64
import hashlib
import re
from typing import Any, Final

from jinja2 import Environment, PackageLoader
from markupsafe import Markup, escape


def markdown(text: str) -> Markup:
    """Return the paragraphs, lists and code spans of a text as HTML."""
    return Markup("").join(map(_block, re.split(r"\n\n+", text.strip()))) if text else Markup("")


def _block(text: str) -> Markup:
    if not text.startswith("- "):
        return Markup("<p>{}</p>").format(spans(text))
    items = (Markup("<li>{}</li>").format(spans(item)) for item in text[2:].split("\n- "))
    return Markup("<ul>{}</ul>").format(Markup("").join(items))


def spans(text: str) -> Markup:
    """Return a line with code spans as HTML."""
    return Markup("").join(
        Markup("<code>{}</code>").format(part) if number % 2 else escape(part)
        for number, part in enumerate(text.split("`"))
    )


def slug(text: str) -> str:
    """Return a name of a page as part of its address."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


_environment: Final = Environment(
    loader=PackageLoader("gateway.http", "html"), autoescape=True, trim_blocks=True
)
_environment.filters |= {
    "markdown": markdown,
    "slug": slug,
    "spans": spans,
}
_STYLE: Final = _environment.get_template("base.html").render().partition("<style>")[2]
_STYLE_HASH: Final = base64.b64encode(
    hashlib.sha256(_STYLE.partition("</style>")[0].encode()).digest()
).decode()
_OTHERS: Final = {"referrer-policy": "no-referrer", "x-content-type-options": "nosniff"}
HEADERS: Final = {
    "content-security-policy": f"default-src 'none'; style-src 'sha256-{_STYLE_HASH}'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    **_OTHERS,
}
REFERENCE_HEADERS: Final = {
    "content-security-policy": f"default-src 'none'; script-src 'self'; "
    f"style-src 'self' 'sha256-{_STYLE_HASH}'; connect-src 'self'; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    **_OTHERS,
}
"""Of the reference, whose script and stylesheet are files."""


def render(template: str, **values: Any) -> str:
    """Return the content of a page."""
    return _environment.get_template(template).render(**values)
