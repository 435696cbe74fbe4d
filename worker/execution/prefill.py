"""The pace at which an engine processes prompts."""

_LEAST_TOKENS = 64
"""Shorter prompts measure other work."""
_KEPT = 0.9
"""Weight of earlier prompts at each new one."""


class PrefillPace:
    """The time in which the engine processes a prompt token, over the last prompts."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0

    def note(self, tokens: int, seconds: float) -> None:
        """Note the uncached tokens of a prompt, and the time from the claim to the first token."""
        if tokens >= _LEAST_TOKENS:
            self._tokens = self._tokens * _KEPT + tokens
            self._seconds = self._seconds * _KEPT + seconds

    @property
    def microseconds(self) -> float:
        """The time per token; 0 if it is not known yet."""
        return self._seconds / self._tokens * 1e6 if self._tokens else 0.0
