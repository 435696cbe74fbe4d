"""The proxy does to a connection what it is set to do."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest
from typing_extensions import override

from tests.failures.chaos.proxy import ANNOUNCED, LOOPBACK, Links, Proxy
from tests.support.patience import PATIENCE_SECONDS


class Echo(asyncio.Protocol):
    """Sends everything back."""

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    @override
    def data_received(self, data: bytes) -> None:
        self._transport.write(data)


Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def echoing() -> AsyncIterator[int]:
    """Run a server that sends everything back; yield its port."""
    server = await asyncio.get_running_loop().create_server(Echo, LOOPBACK, 0)
    yield server.sockets[0].getsockname()[1]
    server.close()
    await server.wait_closed()


@pytest.fixture
async def proxy() -> AsyncIterator[Proxy]:
    """A proxy before a server that sends everything back."""
    async with echoing() as port:
        proxy = Proxy(port, Links(0).address)
        await proxy.start()
        yield proxy
        await proxy.aclose()


async def connect(proxy: Proxy) -> Streams:
    return await asyncio.open_connection(proxy.address, proxy.port)


async def exchange(streams: Streams, data: bytes) -> bytes:
    reader, writer = streams
    writer.write(data)
    return await asyncio.wait_for(reader.readexactly(len(data)), PATIENCE_SECONDS)


async def is_silent(reader: asyncio.StreamReader, seconds: float = 0.2) -> bool:
    try:
        await asyncio.wait_for(reader.read(1), seconds)
    except TimeoutError:
        return True
    return False


async def test_bytes_arrive_in_order(proxy: Proxy) -> None:
    streams = await connect(proxy)
    sent = bytes(range(256)) * 1000
    proxy.delay_seconds = 0.02
    half = asyncio.create_task(exchange(streams, sent))
    await asyncio.sleep(0.01)
    proxy.delay_seconds = 0
    assert await half == sent
    streams[1].close()


async def test_delay_holds_in_both_directions(proxy: Proxy) -> None:
    streams = await connect(proxy)
    await exchange(streams, b"warm")
    proxy.delay_seconds = 0.1
    began = asyncio.get_running_loop().time()
    assert await exchange(streams, b"x") == b"x"
    assert asyncio.get_running_loop().time() - began >= 0.2
    streams[1].close()


async def test_silent_proxy_holds_bytes_back_until_it_is_cleared(proxy: Proxy) -> None:
    old = await connect(proxy)
    await exchange(old, b"warm")
    proxy.silence()
    new = await connect(proxy)
    for reader, writer in (old, new):
        writer.write(b"held")
        assert await is_silent(reader)
    proxy.clear()
    for reader, writer in (old, new):
        assert await asyncio.wait_for(reader.readexactly(4), PATIENCE_SECONDS) == b"held"
        writer.close()


async def test_reset_drops_bytes_that_were_held_back(proxy: Proxy) -> None:
    reader, writer = await connect(proxy)
    await exchange((reader, writer), b"warm")
    proxy.silence()
    writer.write(b"lost")
    proxy.reset()
    with pytest.raises(ConnectionError):
        await asyncio.wait_for(reader.readexactly(4), PATIENCE_SECONDS)
    writer.close()


async def test_cut_resets_old_and_new_connections(proxy: Proxy) -> None:
    old = await connect(proxy)
    await exchange(old, b"warm")
    proxy.cut()
    for streams in (old, await connect(proxy)):
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await exchange(streams, b"x")
        with suppress(ConnectionError):
            streams[1].close()
            await streams[1].wait_closed()
    proxy.clear()
    streams = await connect(proxy)
    assert await exchange(streams, b"back") == b"back"
    streams[1].close()


async def test_a_process_reaches_other_servers_through_its_own_proxies(proxy: Proxy) -> None:
    reader, writer = await connect(proxy)
    moved = f"-MOVED 1 {ANNOUNCED}:7\r\n".encode()
    for part in (moved[:20], moved[20:] + moved):
        writer.write(part)
        await asyncio.sleep(0.02)
    replies = [await asyncio.wait_for(reader.readline(), PATIENCE_SECONDS) for _ in range(2)]
    assert replies == 2 * [f"-MOVED 1 {proxy.address}:7\r\n".encode()]
    writer.close()


async def test_a_lost_server_stays_lost_when_the_network_heals() -> None:
    async with echoing() as first, echoing() as second:
        links = Links(0)
        for port in (first, second):
            await links.open(port)
        streams = [await asyncio.open_connection(links.address, port) for port in (first, second)]
        links.lose(first)
        links.silence()
        links.clear()
        assert await exchange(streams[1], b"x") == b"x"
        streams[0][1].write(b"held")
        assert await is_silent(streams[0][0])
        links.regain(first, is_reset=False)
        assert await streams[0][0].readexactly(4) == b"held"
        for _, writer in streams:
            writer.close()
        await links.aclose()
