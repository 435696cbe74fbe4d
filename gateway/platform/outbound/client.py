"""HTTP client for customer-supplied URLs that cannot reach private networks.

The client resolves a name once, checks every resulting address, and connects to a checked address.
So the name cannot resolve to another address a moment later.
"""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

import httpcore
import httpx

from gateway.platform.outbound.addresses import DEFAULT_PORTS, is_public
from gateway.platform.outbound.wire import MAX_OTHER_BYTES, TooMuchBesideContentError, Wire

Resolve = Callable[[str, int], Awaitable[list[str]]]
"""Returns the addresses of a host; raises OSError or UnicodeError."""


class OutboundError(Exception):
    """A URL cannot be requested or is not allowed; the message gives the reason, not the URL."""


class UnknownHostError(OutboundError):
    """The host name does not resolve."""

    def __init__(self) -> None:
        super().__init__("has a host name that cannot be resolved")


class PrivateHostError(OutboundError):
    """Connecting to the host, or to one of the addresses of its name, is not allowed."""

    def __init__(self) -> None:
        super().__init__("names a host that is not on the public internet")


class UnusualPortError(OutboundError):
    """Connecting to the port is not allowed."""

    def __init__(self) -> None:
        super().__init__("names a port that is not allowed")


class ResponseTooLargeError(OutboundError):
    """The response contains too many bytes that are not content."""

    def __init__(self) -> None:
        super().__init__(f"returned more than {MAX_OTHER_BYTES} bytes besides the content")


@dataclass(frozen=True, slots=True)
class Response:
    """A server's response."""

    status: int
    headers: httpx.Headers
    pieces: AsyncIterator[bytes]
    """The content as sent, in its encoding, as it arrives."""


async def resolve(host: str, port: int) -> list[str]:
    """Return the addresses of a host name."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(each[4][0]) for each in found))


class OutboundClient:
    """Sends requests, each over its own connection.

    It uses no proxies, cookies or redirects, and no headers except those given, `host` and
    `content-length`.

    Args:
        timeout_seconds: Timeout of each step, such as connecting or the next read. The caller
            limits the total time.
        is_allowed: Whether connecting to an address is allowed.
        ports: Ports to which connecting is allowed; any by default.
        resolve: Resolves a host to its addresses.
        trust: Trusted certificates; httpx's default certificates if not given.
    """

    def __init__(
        self,
        *,
        timeout_seconds: float,
        is_allowed: Callable[[str], bool] = is_public,
        ports: Collection[int] | None = None,
        resolve: Resolve = resolve,
        trust: ssl.SSLContext | None = None,
    ) -> None:
        self._timeout = httpx.Timeout(timeout_seconds).as_dict()
        self._is_allowed = is_allowed
        self._ports = ports
        self._resolve = resolve
        self._trust = trust or httpx.create_ssl_context(trust_env=False)

    @asynccontextmanager
    async def stream(
        self, method: str, url: httpx.URL, *, headers: Mapping[str, str], content: bytes = b""
    ) -> AsyncIterator[Response]:
        """Send a request to an http(s) URL, and close the connection at the end of the block.

        Raises OutboundError and the errors of httpcore.
        """
        wire = Wire(await self._addresses(url))
        request = self._request(method, url, headers, content)
        connection = httpcore.AsyncHTTPConnection(
            request.url.origin, ssl_context=self._trust, network_backend=wire
        )
        try:
            response = await connection.handle_async_request(request)
            yield Response(response.status, httpx.Headers(response.headers), wire.content(response))
        except TooMuchBesideContentError:
            raise ResponseTooLargeError from None
        finally:
            await wire.aclose()

    async def _addresses(self, url: httpx.URL) -> list[str]:
        # Use the raw host: `url.host` may re-encode a punycode name as another one.
        host = url.raw_host.decode("ascii")
        port = url.port or DEFAULT_PORTS[url.scheme]
        try:
            addresses = await self._resolve(host, port)
        except (OSError, UnicodeError):
            raise UnknownHostError from None
        if not addresses:
            raise UnknownHostError
        if not all(map(self._is_allowed, addresses)):
            raise PrivateHostError
        if self._ports is not None and port not in self._ports:
            raise UnusualPortError
        return addresses

    def _request(
        self, method: str, url: httpx.URL, headers: Mapping[str, str], content: bytes
    ) -> httpcore.Request:
        length = [("content-length", str(len(content)))] if content else []
        return httpcore.Request(
            method,
            httpcore.URL(
                scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path
            ),
            headers=[("host", url.netloc.decode("ascii")), *headers.items(), *length],
            content=content,
            extensions={"timeout": self._timeout},
        )
