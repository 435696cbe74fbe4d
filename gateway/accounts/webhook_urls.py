"""Which URLs may be told something.

This is a first look, so that mistakes show when a webhook is registered. What a host's name stands for is
checked again each time something is sent there.
"""

from ipaddress import ip_address
from typing import Final
from urllib.parse import SplitResult, urlsplit

from gateway.errors import InvalidParameterError

MAX_URL_CHARACTERS: Final = 2000
LOCAL_SUFFIXES: Final = ("localhost", ".localhost", ".local", ".internal", ".home.arpa")
"""Ends of host names that stand for nothing on the public internet."""


def check_url(url: str, *, allows_private: bool) -> None:
    """Refuse what is not an absolute http(s) URL; of these only https to public hosts unless allowed.

    Raises InvalidParameterError, which does not repeat the URL: it may carry a secret.
    """
    parts = _split(url)
    if parts is None or not parts.hostname:
        raise _refusal("must be an absolute URL such as https://example.com/hooks")
    if parts.username is not None or parts.password is not None:
        raise _refusal("must not carry a user name or password")
    if parts.fragment:
        raise _refusal("must not have a fragment (#...)")
    if allows_private:
        return
    if parts.scheme != "https":
        raise _refusal("must begin with https://")
    if not _looks_public(parts.hostname):
        raise _refusal("must name a host on the public internet")


def host_of(url: str) -> str:
    """Return the host of a checked URL, with its port if it names one."""
    return urlsplit(url).netloc


def _split(url: str) -> SplitResult | None:
    """Return the parts of what is a URL at all."""
    if not 0 < len(url) <= MAX_URL_CHARACTERS or not url.isascii() or not url.isprintable():
        return None
    if any(character in ' "<>\\^`{|}' for character in url):
        return None
    try:
        parts = urlsplit(url)
        has_valid_port = parts.port != 0
    except ValueError:
        return None
    return parts if parts.scheme in ("http", "https") and has_valid_port else None


def _looks_public(host: str) -> bool:
    try:
        address = ip_address(host.partition("%")[0])
    except ValueError:
        name = host.rstrip(".")
        # The last label of a name is never a number; 127.1 and 0x7f.1 are addresses to some programs.
        last = name.rpartition(".")[2]
        return "." in name and not last[:1].isdigit() and not name.endswith(LOCAL_SUFFIXES)
    address = getattr(address, "ipv4_mapped", None) or address
    return address.is_global and not address.is_multicast


def _refusal(why: str) -> InvalidParameterError:
    return InvalidParameterError(f"'url' {why}.", param="url")
