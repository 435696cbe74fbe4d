"""TCP proxies between one process and Redis, which can delay, hold back or reset its traffic."""

import asyncio
from collections import deque
from enum import StrEnum
from typing import cast

from typing_extensions import override

LOOPBACK = "127.0.0.1"
ANNOUNCED = "127.100.100.100"
"""Address that the servers of a cluster announce. Nothing disturbs the connections to it."""
FIRST = 101
"""The last byte of the first process's address; the others follow."""


class Weather(StrEnum):
    """What the proxy does with bytes."""

    CLEAR = "clear"  # Forward them, after the delay.
    SILENT = "silent"  # Accept connections but forward nothing, as if packets were lost.
    REFUSING = "refusing"  # Reset new connections.


class Links:
    """The proxies between one process and each server, together and one by one.

    Each process has an address of its own, at which every server has the same port as at
    `LOOPBACK`. Where a server of a cluster refers to another one, its proxy replaces the announced
    address by that of the process.
    """

    def __init__(self, number: int) -> None:
        self.address = f"{ANNOUNCED.rpartition('.')[0]}.{FIRST + number}"
        self._proxies: dict[int, Proxy] = {}
        self._lost: set[int] = set()

    @property
    def is_used(self) -> bool:
        """Whether a connection is open."""
        return any(proxy.is_used for proxy in self._proxies.values())

    async def open(self, port: int) -> str:
        """Start the proxy to a server. Return its URL for the process."""
        self._proxies[port] = proxy = Proxy(port, self.address)
        await proxy.start()
        return f"redis://{self.address}:{port}/0"

    async def close(self, port: int) -> None:
        """End the proxy to a server."""
        await self._proxies.pop(port).aclose()

    def delay(self, seconds: float) -> None:
        """Add a delay to every chunk of data, in both directions."""
        for proxy in self._proxies.values():
            proxy.delay_seconds = seconds

    def silence(self) -> None:
        """Cut the process off from all servers: forward nothing more, but close nothing."""
        for proxy in self._proxies.values():
            proxy.silence()

    def lose(self, port: int) -> None:
        """Cut the process off from one server, until `regain`."""
        self._lost.add(port)
        self._proxies[port].silence()

    def regain(self, port: int, *, is_reset: bool) -> None:
        """Connect the process with one server again; on request, reset its connections."""
        self._lost.discard(port)
        if is_reset:
            self._proxies[port].reset()
        self._proxies[port].clear()

    def clear(self) -> None:
        """Forward everything again, except to lost servers."""
        for port, proxy in self._proxies.items():
            if port not in self._lost:
                proxy.clear()
            else:
                proxy.silence()

    def cut(self) -> None:
        """Reset every connection, and every new one."""
        for proxy in self._proxies.values():
            proxy.cut()

    def reset(self) -> None:
        """Reset every connection; what it held back is lost."""
        for proxy in self._proxies.values():
            proxy.reset()

    async def aclose(self) -> None:
        """End all proxies."""
        for port in list(self._proxies):
            await self.close(port)


class Proxy:
    """Listens at an address, on the port that its server has at `LOOPBACK`."""

    def __init__(self, port: int, address: str) -> None:
        self.port = port
        self.address = address
        self.delay_seconds = 0.0
        """Added to every chunk of data, in both directions."""
        self.weather = Weather.CLEAR
        self._server: asyncio.Server | None = None
        self._pipes: set[_Pipe] = set()

    @property
    def is_used(self) -> bool:
        """Whether a connection is open."""
        return bool(self._pipes)

    async def start(self) -> None:
        """Start listening."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(self._accept, self.address, self.port)

    async def aclose(self) -> None:
        """Stop listening and reset every connection."""
        if self._server is not None:
            self._server.close()
            self.reset()
            await self._server.wait_closed()

    def silence(self) -> None:
        """Forward nothing more, but close nothing."""
        self.weather = Weather.SILENT
        for pipe in self._pipes:
            pipe.hold()

    def clear(self) -> None:
        """Forward everything again, what was held back first."""
        self.weather = Weather.CLEAR
        for pipe in list(self._pipes):
            pipe.release()

    def cut(self) -> None:
        """Reset every connection, and every new one."""
        self.weather = Weather.REFUSING
        self.reset()

    def reset(self) -> None:
        """Reset every connection; what it held back is lost."""
        for pipe in list(self._pipes):
            pipe.abort()

    def _accept(self) -> asyncio.Protocol:
        return _Pipe(self).near

    def opened(self, pipe: "_Pipe") -> bool:
        """Register a connection. Return whether it is accepted."""
        if self.weather is Weather.REFUSING:
            return False
        self._pipes.add(pipe)
        return True

    def closed(self, pipe: "_Pipe") -> None:
        """Remove a connection."""
        self._pipes.discard(pipe)


class _Pipe:
    """One connection: its ends to the process and to Redis."""

    def __init__(self, proxy: Proxy) -> None:
        self.proxy = proxy
        self.near = _End(self)
        self._far = _End(self)
        self._connecting: asyncio.Task[None] | None = None

    def other(self, end: "_End") -> "_End":
        return self._far if end is self.near else self.near

    def begin(self, end: "_End") -> None:
        """One end is connected; the process's end comes first."""
        if end is not self.near:
            return
        if not self.proxy.opened(self):
            self.abort()
        elif self.proxy.weather is Weather.SILENT:
            self.hold()
        else:
            self._connect()

    def hold(self) -> None:
        for end in (self.near, self._far):
            end.hold()

    def release(self) -> None:
        self._connect()
        for end in (self.near, self._far):
            end.release()

    def abort(self) -> None:
        """Reset both ends."""
        self.proxy.closed(self)
        if self._connecting is not None:
            self._connecting.cancel()
        for end in (self.near, self._far):
            end.abort()

    def _connect(self) -> None:
        if self._connecting is None:
            self._connecting = asyncio.create_task(self._reach_target())

    async def _reach_target(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            await loop.create_connection(lambda: self._far, LOOPBACK, self.proxy.port)
        except OSError:
            self.abort()
            return
        if self.proxy.weather is Weather.SILENT:
            self.hold()


class _End(asyncio.Protocol):
    """One end of a connection; what it reads is written to the other end."""

    def __init__(self, pipe: _Pipe) -> None:
        self._pipe = pipe
        self._transport: asyncio.Transport | None = None
        self._is_held = False
        self._unsent: deque[tuple[float, bytes]] = deque()
        """Data to write to this end, and when."""
        self._incomplete = b""
        """The beginning of an address, whose rest has not been read."""
        self._timer: asyncio.TimerHandle | None = None

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._pipe.begin(self)
        self._flush()

    @override
    def data_received(self, data: bytes) -> None:
        proxy = self._pipe.proxy
        if self is not self._pipe.near:
            data, self._incomplete = _renamed(self._incomplete + data, proxy.address)
        self._pipe.other(self).write(data, proxy.delay_seconds)

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._pipe.abort()

    def write(self, data: bytes, delay: float) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time() + delay
        if self._unsent:
            due = max(due, self._unsent[-1][0])
        elif not delay and self._transport is not None and not self._is_held:
            self._transport.write(data)
            return
        self._unsent.append((due, data))
        self._flush()

    def hold(self) -> None:
        self._is_held = True
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def release(self) -> None:
        self._is_held = False
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()
        self._flush()

    def abort(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._unsent.clear()
        if self._transport is not None:
            self._transport.abort()

    def _flush(self) -> None:
        """Write what is due, and schedule the rest."""
        if self._transport is None or self._is_held:
            return
        loop = asyncio.get_running_loop()
        while self._unsent and self._unsent[0][0] <= loop.time():
            self._transport.write(self._unsent.popleft()[1])
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._unsent:
            self._timer = loop.call_at(self._unsent[0][0], self._flush)


def _renamed(data: bytes, address: str) -> tuple[bytes, bytes]:
    """Replace announced addresses. Return the beginning of one at the end of the data, too."""
    announced = ANNOUNCED.encode()
    data, end = data.replace(announced, address.encode()), len(data)
    # A reply ends with a line.
    if not data.endswith(b"\n"):
        for length in range(len(announced) - 1, 0, -1):
            if data.endswith(announced[:length]):
                end -= length
                break
    return data[:end], data[end:]
