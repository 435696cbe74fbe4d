"""Suspects: jobs with which an engine has died, submitted to the engine one at a time.

If two suspects were in an engine that dies, the cause would be ambiguous. A suspect that has
received a token in this attempt is treated like any other job.
"""

from collections import deque

from worker.execution.generation import Generation


class Suspects:
    """The waiting suspects, and the one whose first token is pending."""

    def __init__(self) -> None:
        self._waiting: deque[Generation] = deque()
        self._current: Generation | None = None

    @property
    def are_waiting(self) -> bool:
        """Whether suspects wait for another one's first token."""
        return bool(self._waiting)

    def add(self, generation: Generation) -> None:
        """Queue a suspect."""
        self._waiting.append(generation)

    def next(self) -> Generation | None:
        """Return the next suspect, or None if none may start yet."""
        current = self._current
        if current is not None and not (current.has_ended or current.has_progressed):
            return None
        self._current = None
        while self._waiting and self._current is None:
            generation = self._waiting.popleft()
            if not generation.has_ended:
                self._current = generation
        return self._current
