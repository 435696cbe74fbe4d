"""Keep-alives of a stream."""

import asyncio

from gateway.dispatch.generation import Generation


class KeepAlive:
    """Wakes a stream after a silent interval."""

    def __init__(self, generation: Generation, seconds: float) -> None:
        self.sent = False
        self.due = False
        self._generation = generation
        self._seconds = seconds
        self._timer = asyncio.get_running_loop().call_later(seconds, self._tick)

    def _tick(self) -> None:
        self.due = not self.sent
        self.sent = False
        if self.due:
            self._generation.wake()
        self._timer = asyncio.get_running_loop().call_later(self._seconds, self._tick)

    def stop(self) -> None:
        """Send no more keep-alives."""
        self._timer.cancel()
