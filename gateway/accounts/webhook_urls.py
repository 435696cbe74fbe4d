"""Which URLs may be told something.

This is a first look, so that mistakes show when a webhook is registered. What a host's name stands for is
checked again each time something is sent there.
"""

from typing import Final
from urllib.parse import urlsplit

from gateway.errors import InvalidParameterError
from gateway.outbound.addresses import looks_public
from gateway.outbound.urls import DEFAULT_PORTS, HTTPS_PORTS, split_url

MAX_URL_CHARACTERS: Final = 2000


def check_url(url: str, *, allows_private: bool) -> None:
    """Refuse what is not an absolute http(s) URL; of these only https to usual ports of public hosts unless allowed.

    Raises InvalidParameterError, which does not repeat the URL: it may carry a secret.
    """
    parts = split_url(url, most_characters=MAX_URL_CHARACTERS)
    if parts is None or parts.hostname is None:
        raise _refusal("must be an absolute URL such as https://example.com/hooks")
    if parts.username is not None or parts.password is not None:
        raise _refusal("must not carry a user name or password")
    if parts.fragment:
        raise _refusal("must not have a fragment (#...)")
    if allows_private:
        return
    if parts.scheme != "https":
        raise _refusal("must begin with https://")
    if not looks_public(parts.hostname):
        raise _refusal("must name a host on the public internet")
    if (parts.port or DEFAULT_PORTS["https"]) not in HTTPS_PORTS:
        ports = " or ".join(map(str, HTTPS_PORTS))
        raise _refusal(f"must name no port but {ports}. Given: {parts.port}")


def host_of(url: str) -> str:
    """Return the host of a checked URL, with its port if it names one."""
    return urlsplit(url).netloc


def _refusal(why: str) -> InvalidParameterError:
    return InvalidParameterError(f"'url' {why}.", param="url")
