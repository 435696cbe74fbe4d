"""Validation of webhook URLs.

This first check reveals mistakes when a webhook is registered. The address of a host is checked
again for each request to it.
"""

from typing import Final
from urllib.parse import urlsplit

from gateway.platform.outbound.addresses import DEFAULT_PORTS, HTTPS_PORTS, looks_public, split_url
from gateway.records.errors import InvalidParameterError

MAX_URL_CHARACTERS: Final = 2000


def check_url(url: str, *, allows_private: bool) -> None:
    """Reject anything but absolute http(s) URLs.

    By default it allows only https to usual ports of public hosts. Raises InvalidParameterError,
    which omits the URL because it may contain a secret.
    """
    parts = split_url(url, most_characters=MAX_URL_CHARACTERS)
    if parts is None or parts.hostname is None:
        raise _refusal("must be an absolute URL such as https://example.com/hooks")
    if parts.username is not None or parts.password is not None:
        raise _refusal("must not contain a user name or password")
    if parts.fragment:
        raise _refusal("must not have a fragment (#...)")
    if allows_private:
        return
    if parts.scheme != "https":
        raise _refusal("must begin with https://")
    if not looks_public(parts.hostname):
        raise _refusal("must have a host on the public internet")
    if (parts.port or DEFAULT_PORTS["https"]) not in HTTPS_PORTS:
        ports = " or ".join(map(str, HTTPS_PORTS))
        raise _refusal(f"must use port {ports}. Given: {parts.port}")


def host_of(url: str) -> str:
    """Return the host of a checked URL, with its port if it has one."""
    return urlsplit(url).netloc


def _refusal(why: str) -> InvalidParameterError:
    return InvalidParameterError(f"'url' {why}.", param="url")
