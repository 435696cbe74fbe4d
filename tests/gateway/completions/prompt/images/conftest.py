"""Servers, names, and a record of every connection."""

import socket
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from gateway.completions.prompt.images.fetcher import ImageFetcher
from tests.gateway.completions.prompt.images.serving import (
    FORBIDDEN,
    SERVED,
    Names,
    Server,
    fetching,
    is_served,
    serving,
)
from tests.support.certificates import self_signed


@pytest.fixture
def connected(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Addresses to which this process has connected."""
    addresses: list[Any] = []
    for name in ("connect", "connect_ex"):
        original = getattr(socket.socket, name)

        def connect(self: socket.socket, address: Any, original: Any = original) -> Any:
            if self.family in (socket.AF_INET, socket.AF_INET6):
                addresses.append(address[:2])
            return original(self, address)

        monkeypatch.setattr(socket.socket, name, connect)
    return addresses


@pytest.fixture
def names() -> Names:
    """A resolver: `images.example` is the server, `private.example` a private address."""
    return Names({"images.example": [[SERVED]], "private.example": [[FORBIDDEN]]})


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    async with serving() as server:
        yield server


@pytest.fixture
async def forbidden(server: Server) -> AsyncIterator[Server]:
    """A server on the same port of an address that may not be reached."""
    async with serving(FORBIDDEN, server.port) as forbidden:
        yield forbidden


@pytest.fixture
def fetcher(server: Server, names: Names) -> ImageFetcher:
    """A fetcher that allows every host, on the usual ports and on the server's."""
    return fetching("*", f"*:{server.port}", names=names, is_allowed=is_served)


@pytest.fixture
def tls(tmp_path: Path) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """A server context for `images.example`, and a client context that trusts only it."""
    return self_signed("images.example", tmp_path)
