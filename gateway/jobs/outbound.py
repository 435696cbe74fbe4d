"""Sending to URLs that customers chose, without letting them reach what is not on the public internet.

A name is resolved once, every address that it stands for is checked, and the connection goes to a checked
address: so the name cannot stand for another one a moment later.
"""

import asyncio
import socket
import ssl
from collections.abc import Mapping
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address
from typing import Final

import httpx

TIMEOUT_SECONDS: Final = 5.0
"""For resolving, connecting, sending and the answer's status together."""

_NAT64: Final = IPv6Network("64:ff9b::/96")
_DEFAULT_PORTS: Final = {"http": 80, "https": 443}


class DeliveryError(Exception):
    """Something could not be delivered; the message says why and repeats nothing of the URL."""


class Outbound:
    """Posts to URLs.

    Args:
        allows_private: whether plain http and private addresses are allowed, too.
        trust: certificates to trust; the usual ones if not given.
    """

    def __init__(self, *, allows_private: bool, trust: ssl.SSLContext | None = None) -> None:
        self._allows_private = allows_private
        self._client = httpx.AsyncClient(
            follow_redirects=False,
            trust_env=False,
            verify=True if trust is None else trust,
            timeout=TIMEOUT_SECONDS,
            limits=httpx.Limits(max_keepalive_connections=0),
        )

    async def post(self, url: str, body: bytes, headers: Mapping[str, str]) -> None:
        """Send `body`. Raises DeliveryError unless the answer is a success (2xx)."""
        try:
            async with asyncio.timeout(TIMEOUT_SECONDS):
                status = await self._post(_parse(url), body, headers)
        except TimeoutError:
            raise DeliveryError("no answer in time") from None
        except DeliveryError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever a URL brings about, the next one is sent
            raise DeliveryError(f"cannot be reached: {type(error).__name__}") from None
        if 300 <= status < 400:
            raise DeliveryError(f"answered with a redirect ({status}), which is not followed")
        if not 200 <= status < 300:
            raise DeliveryError(f"answered with status {status}")

    async def aclose(self) -> None:
        """Close all connections."""
        await self._client.aclose()

    async def _post(self, url: httpx.URL, body: bytes, headers: Mapping[str, str]) -> int:
        if url.scheme != "https" and not (self._allows_private and url.scheme == "http"):
            raise DeliveryError("is not an https URL")
        *earlier, last = await self._addresses(url)
        for address in earlier:
            try:
                return await self._post_to(url, address, body, headers)
            except (httpx.ConnectError, httpx.ConnectTimeout):
                continue
        return await self._post_to(url, last, body, headers)

    async def _addresses(self, url: httpx.URL) -> list[str]:
        loop = asyncio.get_running_loop()
        port = url.port or _DEFAULT_PORTS[url.scheme]
        try:
            found = await loop.getaddrinfo(url.host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):
            raise DeliveryError("has a host name that cannot be resolved") from None
        addresses = list(dict.fromkeys(str(each[4][0]) for each in found))
        if not self._allows_private and not all(map(is_public, addresses)):
            raise DeliveryError("names a host that is not on the public internet")
        return addresses

    async def _post_to(
        self, url: httpx.URL, address: str, body: bytes, headers: Mapping[str, str]
    ) -> int:
        request = self._client.build_request(
            "POST",
            url.copy_with(host=address),
            content=body,
            headers={**headers, "host": url.netloc.decode("ascii")},
            extensions={"sni_hostname": url.raw_host.decode("ascii")},
        )
        response = await self._client.send(request, stream=True)
        try:
            return response.status_code
        finally:
            # Nobody wants to know what else it says, however much that is.
            await response.aclose()


def is_public(address: str) -> bool:
    """Whether an address is one of the public internet, also behind an IPv6 address that stands for it."""
    parsed = ip_address(address.partition("%")[0])
    if isinstance(parsed, IPv6Address):
        inner = _inner(parsed)
        if inner is not None:
            return is_public(str(inner))
    return parsed.is_global and not parsed.is_multicast


def _inner(address: IPv6Address) -> IPv4Address | None:
    """Return the IPv4 address to which a translated or tunnelled one leads."""
    if address in _NAT64:
        return IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped or address.sixtofour or (address.teredo or (None, None))[1]


def _parse(url: str) -> httpx.URL:
    parsed = httpx.URL(url)
    if not parsed.host:
        raise DeliveryError("is not a URL")
    return parsed
