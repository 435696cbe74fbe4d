"""Keep-alives of a stream."""

import asyncio

from gateway.dispatch.generation import Generation
from gateway.stream.sse import BEGINNING, KEEP_ALIVE, ChunkRenderer


class KeepAlive:
    """Wakes a stream after each interval without an event."""

    def __init__(self, generation: Generation, renderer: ChunkRenderer, seconds: float) -> None:
        self.has_begun = False
        """Whether a keep-alive has sent the beginning of the next event."""
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
        if events and self.has_begun:
            events, self.has_begun = events.removeprefix(BEGINNING), False
        elif is_due and not events:
            events, self.has_begun = KEEP_ALIVE if self.has_begun else BEGINNING, True
        return events

    def stop(self) -> None:
        """Send no more keep-alives."""
        self._timer.cancel()
