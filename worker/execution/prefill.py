"""The pace at which an engine processes prompts."""

_LEAST_TOKENS = 64
"""Shorter prompts measure other work."""
_MEMORY_TOKENS = 20_000
"""After so many tokens, earlier prompts count half: short ones do not hide what long ones show."""
_GUESSED_MICROSECONDS = 50.0
"""Until a prompt is measured: a new worker would else take jobs that others have cached."""


class PrefillPace:
    """The time in which the engine processes a prompt token, over the last prompts."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0

    def note(self, tokens: int, seconds: float) -> None:
        """Note the uncached tokens of a prompt, and the time from the claim to the first token."""
        if tokens >= _LEAST_TOKENS:
            kept = _MEMORY_TOKENS / (_MEMORY_TOKENS + tokens)
            self._tokens = self._tokens * kept + tokens
            self._seconds = self._seconds * kept + seconds

    @property
    def microseconds(self) -> float:
        """The time per token."""
        return self._seconds / self._tokens * 1e6 if self._tokens else _GUESSED_MICROSECONDS
