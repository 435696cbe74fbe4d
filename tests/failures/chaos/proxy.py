"""A TCP proxy between one process and Redis, which can delay, hold back or reset its traffic."""

import asyncio
from collections import deque
from enum import StrEnum
from typing import cast

from typing_extensions import override

LOOPBACK = "127.0.0.1"


class Weather(StrEnum):
    """What the proxy does with bytes."""

    CLEAR = "clear"  # Forward them, after the delay.
    SILENT = "silent"  # Accept connections but forward nothing, as if packets were lost.
    REFUSING = "refusing"  # Reset new connections.


class Proxy:
    """Listens on a port of loopback and connects to another one."""

    def __init__(self, target_port: int) -> None:
        self.port = 0
        self.delay_seconds = 0.0
        """Added to every chunk of data, in both directions."""
        self.weather = Weather.CLEAR
        self._target_port = target_port
        self._server: asyncio.Server | None = None
        self._pipes: set[_Pipe] = set()

    @property
    def url(self) -> str:
        """URL at which the proxy serves Redis."""
        return f"redis://{LOOPBACK}:{self.port}/0"

    @property
    def is_used(self) -> bool:
        """Whether a connection is open."""
        return bool(self._pipes)

    async def start(self) -> None:
        """Start listening."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(self._accept, LOOPBACK, 0)
        self.port = self._server.sockets[0].getsockname()[1]

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
        pipe = _Pipe(self, self._target_port)
        return pipe.near

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

    def __init__(self, proxy: Proxy, target_port: int) -> None:
        self.proxy = proxy
        self.near = _End(self)
        self._far = _End(self)
        self._target_port = target_port
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
            await loop.create_connection(lambda: self._far, LOOPBACK, self._target_port)
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
        self._timer: asyncio.TimerHandle | None = None

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._pipe.begin(self)
        self._flush()

    @override
    def data_received(self, data: bytes) -> None:
        self._pipe.other(self).write(data, self._pipe.proxy.delay_seconds)

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
