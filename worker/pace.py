"""How often new text is sent.

A delta costs the same however long it is: its place in a frame, a wake-up in the gateway, a write to the
client's socket. A worker that steps fast for many sequences therefore sends what several steps brought
in one delta. A first token, and the end of a sequence, never wait.
"""

SECONDS_PER_SEQUENCE = 0.000625
"""Pause that each running sequence adds: few of them get every step's text at once."""


class Pace:
    """Tells for each engine step whether text that gathers is to be sent with it."""

    def __init__(self, longest_seconds: float) -> None:
        self._longest_seconds = longest_seconds
        self._sent_at = 0.0

    def is_due(self, now: float, sequences: int) -> bool:
        """Whether to send at `now` (seconds of any steady clock), with this many sequences running."""
        pause = min(self._longest_seconds, sequences * SECONDS_PER_SEQUENCE)
        if now - self._sent_at < pause:
            return False
        self._sent_at = now
        return True
