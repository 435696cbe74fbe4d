"""Requests to URLs that customers chose, without letting them reach what is not on the public internet.

A name is resolved once, every address that it stands for is checked, and the connection goes to a checked
address: so the name cannot stand for another one a moment later.
"""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager

import httpx

from gateway.outbound.addresses import is_public
from gateway.outbound.urls import DEFAULT_PORTS

Resolve = Callable[[str, int], Awaitable[list[str]]]
"""Returns the addresses of a host; raises OSError or UnicodeError."""


class OutboundError(Exception):
    """A host cannot be connected to, or may not; the message says why and repeats nothing of the URL."""


class UnknownHostError(OutboundError):
    """The host's name stands for nothing."""

    def __init__(self) -> None:
        super().__init__("has a host name that cannot be resolved")


class PrivateHostError(OutboundError):
    """The host, or one of the addresses that its name stands for, may not be connected to."""

    def __init__(self) -> None:
        super().__init__("names a host that is not on the public internet")


async def resolve(host: str, port: int) -> list[str]:
    """Return the addresses that a host's name stands for."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(each[4][0]) for each in found))


class OutboundClient:
    """Sends single requests, each over a connection of its own.

    There are no proxies, cookies or redirects, and no headers but those given and `host`.

    Args:
        timeout_seconds: for each step, such as connecting or the next bytes; the caller bounds the whole.
        is_allowed: whether an address may be connected to.
        resolve: how a host's addresses are found.
        trust: certificates to trust; the usual ones if not given.
    """

    def __init__(
        self,
        *,
        timeout_seconds: float,
        is_allowed: Callable[[str], bool] = is_public,
        resolve: Resolve = resolve,
        trust: ssl.SSLContext | None = None,
    ) -> None:
        self._timeout = httpx.Timeout(timeout_seconds).as_dict()
        self._is_allowed = is_allowed
        self._resolve = resolve
        self._transport = httpx.AsyncHTTPTransport(
            trust_env=False,
            verify=True if trust is None else trust,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
        )

    @asynccontextmanager
    async def stream(
        self, method: str, url: httpx.URL, *, headers: Mapping[str, str], content: bytes = b""
    ) -> AsyncIterator[httpx.Response]:
        """Send a request to an http(s) URL; the response's body is still to be read, and closed at the end.

        Raises OutboundError, or what httpx raises.
        """
        *earlier, last = await self._addresses(url)
        for address in earlier:
            try:
                response = await self._send(method, url, address, headers, content)
                break
            except (httpx.ConnectError, httpx.ConnectTimeout):
                continue
        else:
            response = await self._send(method, url, last, headers, content)
        try:
            yield response
        finally:
            await response.aclose()

    async def aclose(self) -> None:
        """Close all connections."""
        await self._transport.aclose()

    async def _addresses(self, url: httpx.URL) -> list[str]:
        # As it stands in the URL: what `url.host` makes of a name in punycode may be encoded as another one.
        host = url.raw_host.decode("ascii")
        try:
            addresses = await self._resolve(host, url.port or DEFAULT_PORTS[url.scheme])
        except (OSError, UnicodeError):
            raise UnknownHostError from None
        if not addresses:
            raise UnknownHostError
        if not all(map(self._is_allowed, addresses)):
            raise PrivateHostError
        return addresses

    async def _send(
        self,
        method: str,
        url: httpx.URL,
        address: str,
        headers: Mapping[str, str],
        content: bytes,
    ) -> httpx.Response:
        request = httpx.Request(
            method,
            url.copy_with(host=address),
            content=content or None,
            headers={**headers, "host": url.netloc.decode("ascii")},
            extensions={
                "sni_hostname": url.raw_host.decode("ascii"),
                "timeout": self._timeout,
            },
        )
        return await self._transport.handle_async_request(request)
