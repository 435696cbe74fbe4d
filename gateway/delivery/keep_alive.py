"""Keep-alives of a stream."""

import asyncio

from gateway.dispatch.generation import Generation
from gateway.stream.sse import ChunkRenderer


class KeepAlive:
    """Wakes a stream after each interval without an event."""

    def __init__(self, generation: Generation, renderer: ChunkRenderer, seconds: float) -> None:
        self._is_due = False
        self._generation = generation
        self._renderer = renderer
        self._number = renderer.number
        self._seconds = seconds
        self._timer = asyncio.get_running_loop().call_later(seconds, self._tick)

    def _tick(self) -> None:
        number = self._renderer.number
        self._is_due, self._number = number == self._number, number
        if self._is_due:
            self._generation.wake()
        self._timer = asyncio.get_running_loop().call_later(self._seconds, self._tick)

    def after(self, events: bytes) -> bytes:
        """Return what to send after a wake-up: its events, or else a keep-alive that is due."""
        is_due, self._is_due = self._is_due, False
        return self._renderer.keep_alive if is_due and not events else events

    def stop(self) -> None:
        """Send no more keep-alives."""
        self._timer.cancel()
