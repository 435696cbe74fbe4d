"""Web servers that send images or misbehave, and a fetcher that may reach them."""

import asyncio
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import cast

from typing_extensions import override

from gateway.completions.prompt.images.fetcher import ImageFetcher, fetch_images
from gateway.dialects.request import ImageSource
from gateway.platform.outbound.addresses import HostPattern, is_public, parse_host_pattern
from gateway.platform.outbound.client import OutboundClient, resolve
from tests.support.patience import PATIENCE_SECONDS

PNG = b"\x89PNG\r\n\x1a\n and so on"
PARAM = "messages[0].content[1].image_url.url"
SERVED = "127.0.0.1"
FORBIDDEN = "127.0.0.2"
"""Address of a second server, which stands for the operator's network."""

ClientResponse = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def image(content: bytes = PNG, media_type: str = "image/png", headers: str = "") -> bytes:
    """Return a response with an image."""
    head = f"HTTP/1.1 200 OK\r\ncontent-type: {media_type}\r\n{headers}"
    return f"{head}content-length: {len(content)}\r\n\r\n".encode() + content


def redirect(location: str, status: int = 302) -> bytes:
    """Return a redirect."""
    return f"HTTP/1.1 {status} X\r\nlocation: {location}\r\ncontent-length: 0\r\n\r\n".encode()


@dataclass
class Server:
    """Serves each path with given bytes or by a function, and counts connections."""

    host: str
    port: int = 0
    responses: dict[str, bytes | ClientResponse] = field(default_factory=dict)
    connections: int = 0
    requests: list[str] = field(default_factory=list)
    """Heads of the requests."""
    left: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a client closes a connection before the response has ended."""
    open_connections: set[asyncio.Task[None]] = field(default_factory=set)

    def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.open_connections.add(asyncio.ensure_future(self.respond(reader, writer)))

    async def respond(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            self.requests.append(head)
            response = self.responses[head.split(" ")[1]]
            if isinstance(response, bytes):
                writer.write(response)
                await writer.drain()
            else:
                await response(reader, writer)
        except ConnectionError:
            self.left.set()
        finally:
            writer.close()


@asynccontextmanager
async def serving(
    host: str = SERVED, port: int = 0, *, tls: ssl.SSLContext | None = None
) -> AsyncIterator[Server]:
    """Run a server."""
    server = Server(host)
    listening = await asyncio.start_server(server.serve, host, port, ssl=tls)
    server.port = listening.sockets[0].getsockname()[1]
    try:
        yield server
    finally:
        listening.close()
        for task in server.open_connections:
            task.cancel()
        await asyncio.gather(*server.open_connections, return_exceptions=True)
        await listening.wait_closed()


@dataclass
class Names:
    """Resolves names of tests, each query with the next addresses, and records queries."""

    addresses: dict[str, list[list[str]]] = field(default_factory=dict)
    """Addresses of each name, one list for each query; the last one repeats."""
    asked: list[str] = field(default_factory=list)

    async def resolve(self, host: str, port: int) -> list[str]:
        self.asked.append(host)
        lists = self.addresses.get(host)
        if lists is not None:
            return lists.pop(0) if len(lists) > 1 else lists[0]
        if host.endswith(".example"):
            raise socket.gaierror
        return await resolve(host, port)


class NameServer(asyncio.DatagramProtocol):
    """A name server of SERVED and an IPv6 address, which is silent about some names."""

    def __init__(self) -> None:
        self.asked: set[bytes] = set()

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.DatagramTransport", transport)

    @override
    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        name, rest = data[12:].split(b"\0", 1)
        self.asked.add(name)
        if b"silent" in name:
            return
        is_ipv4 = rest[:2] == b"\0\1"
        address = socket.inet_aton(SERVED) if is_ipv4 else socket.inet_pton(socket.AF_INET6, "::1")
        # The question's header and name, then a record for that name.
        answer = data[:2] + b"\x81\x80\0\1\0\1\0\0\0\0" + name + b"\0" + rest[:4]
        answer += b"\xc0\x0c" + rest[:4] + struct.pack(">IH", 5, len(address)) + address
        self.transport.sendto(answer, addr)


@cache
def _default_trust() -> ssl.SSLContext:
    """Return the default trust store. Reading it takes longer than most tests."""
    return ssl.create_default_context()


def fetching(
    *patterns: str,
    names: Names,
    is_allowed: Callable[[str], bool] = is_public,
    timeout_seconds: float = PATIENCE_SECONDS,
    max_bytes: int = 2**20,
    trust: ssl.SSLContext | None = None,
) -> ImageFetcher:
    """Return a fetcher; unlike the gateway's it can be allowed addresses that are not public."""
    trust = trust or _default_trust()
    hosts: Sequence[HostPattern] = [parse_host_pattern(pattern) for pattern in patterns]
    client = OutboundClient(
        timeout_seconds=timeout_seconds, is_allowed=is_allowed, resolve=names.resolve, trust=trust
    )
    return ImageFetcher(hosts, client, timeout_seconds=timeout_seconds, max_bytes=max_bytes)


def is_served(address: str) -> bool:
    """Whether an address counts as public in a test."""
    return address == SERVED or is_public(address)


async def fetch(fetcher: ImageFetcher, *urls: str, tenant_id: str = "tenant") -> list[bytes]:
    """Fetch the images of a message, from its second part on."""
    sources = [
        ImageSource(url=url, param=f"messages[0].content[{part}].image_url.url")
        for part, url in enumerate(urls, start=1)
    ]
    return await fetch_images(sources, fetcher=fetcher, tenant_id=tenant_id)
