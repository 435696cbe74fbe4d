"""A TCP load balancer for gateways: it sends each connection to one that is ready."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Final
from urllib.parse import urlsplit

from common.tasks import end_task
from tests.support.patience import PATIENCE_SECONDS

PROBE_SECONDS: Final = 0.1
"""Interval of readiness probes."""
ANSWER_SECONDS: Final = 10.0
"""Timeout of a probe; a gateway that has exited refuses the connection at once."""
_PROBE: Final = b"GET /readyz HTTP/1.1\r\nhost: gateway\r\nconnection: close\r\n\r\n"


class Balancer:
    """Forwards bytes between clients and gateways, in turn and only to those that are ready."""

    def __init__(self, gateways: Sequence[str]) -> None:
        self.url = ""
        self._ready = dict.fromkeys((_address(url) for url in gateways), False)
        self._turn = 0

    async def probe(self) -> None:
        """Probe the gateways until cancelled."""
        while True:
            await asyncio.gather(*(self._probe(address) for address in self._ready))
            await asyncio.sleep(PROBE_SECONDS)

    async def pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one client's connection."""
        try:
            there, back = await self._connect()
        except (OSError, TimeoutError):
            writer.close()
            return
        ways = [asyncio.create_task(_copy(reader, back)), asyncio.create_task(_copy(there, writer))]
        # When one end closes, close the other.
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        if not ways[1].done():
            back.close()
        await asyncio.wait(ways)

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while True:
                ready = [address for address, is_ready in self._ready.items() if is_ready]
                self._turn += 1
                for place in range(len(ready)):
                    address = ready[(self._turn + place) % len(ready)]
                    with suppress(OSError):
                        return await asyncio.open_connection(*address)
                await asyncio.sleep(PROBE_SECONDS)

    async def _probe(self, address: tuple[str, int]) -> None:
        reported = b""
        with suppress(OSError, TimeoutError):
            async with asyncio.timeout(ANSWER_SECONDS):
                reader, writer = await asyncio.open_connection(*address)
                try:
                    writer.write(_PROBE)
                    reported = await reader.readline()
                finally:
                    writer.close()
        self._ready[address] = b" 200 " in reported


@asynccontextmanager
async def balancing(gateways: Sequence[str]) -> AsyncIterator[Balancer]:
    """Run a balancer for the length of a block."""
    balancer = Balancer(gateways)
    server = await asyncio.start_server(balancer.pass_on, "127.0.0.1", 0)
    balancer.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    probing = asyncio.create_task(balancer.probe())
    try:
        yield balancer
    finally:
        await end_task(probing)
        server.close()
        await server.wait_closed()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(65_536):
            writer.write(data)
            await writer.drain()
    writer.close()


def _address(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    return str(parts.hostname), int(parts.port or 80)
