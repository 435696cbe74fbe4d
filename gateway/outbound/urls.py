"""Parse customer-supplied URLs."""

from typing import Final
from urllib.parse import SplitResult, urlsplit

DEFAULT_PORTS: Final = {"http": 80, "https": 443}

HTTPS_PORTS: Final = (443, 8443)
"""Ports of webhook receivers. Other ports belong to services that do not expect such requests."""

_FORBIDDEN: Final = frozenset(' "<>\\^`{|}')
"""Characters that must be percent-encoded in a URL; programs disagree on how to parse them
unencoded."""


def split_url(text: str, *, most_characters: int) -> SplitResult | None:
    """Return the parts of an absolute http(s) URL; None for any other text."""
    if not 0 < len(text) <= most_characters or not text.isascii() or not text.isprintable():
        return None
    if not _FORBIDDEN.isdisjoint(text):
        return None
    try:
        parts = urlsplit(text)
        has_valid_port = parts.port != 0
    except ValueError:
        return None
    is_web = parts.scheme in DEFAULT_PORTS and bool(parts.hostname)
    return parts if is_web and has_valid_port else None
