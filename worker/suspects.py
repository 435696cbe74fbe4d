"""Jobs with which an engine has died, given to the engine one by one.

If two of them were in the engine when it dies, nobody could tell which one is to blame. A suspect that has got
a token in this attempt is as good as any other job.
"""

from collections import deque

from worker.generation import Generation


class Suspects:
    """The suspects that wait, and the one whose first token is waited for."""

    def __init__(self) -> None:
        self._waiting: deque[Generation] = deque()
        self._current: Generation | None = None

    @property
    def are_waiting(self) -> bool:
        """Whether a suspect waits for another one's first token."""
        return bool(self._waiting)

    def add(self, generation: Generation) -> None:
        """Have a suspect wait for its turn."""
        self._waiting.append(generation)

    def discard(self, generation: Generation) -> None:
        """Wait no more for a job that has ended."""
        if generation is self._current:
            self._current = None
        elif generation in self._waiting:
            self._waiting.remove(generation)

    def clear(self) -> None:
        """Forget all."""
        self._waiting.clear()

    def next(self) -> Generation | None:
        """Return the suspect whose turn it is now, if there is one."""
        if not self._waiting or (self._current is not None and not self._current.has_progressed):
            return None
        self._current = self._waiting.popleft()
        return self._current
