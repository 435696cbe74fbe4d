"""Pace of deltas: how often new text is sent.

A delta has a fixed cost whatever its length: its entry in a frame, a wake-up in the gateway, and a
write to the client's socket. A worker with fast steps and many sequences therefore combines the
text of several steps in one delta. First tokens and ends of sequences are sent immediately.
"""

SECONDS_PER_SEQUENCE = 0.000625
"""Pause per running sequence: with few sequences, the text of every step is sent at once."""


class Pace:
    """Decides for each engine step whether to send the collected text."""

    def __init__(self, longest_seconds: float) -> None:
        self._longest_seconds = longest_seconds
        self._sent_at = 0.0

    def is_due(self, now: float, sequences: int) -> bool:
        """Whether to send at `now` (monotonic seconds), with this many running sequences."""
        pause = min(self._longest_seconds, sequences * SECONDS_PER_SEQUENCE)
        if now - self._sent_at < pause:
            return False
        self._sent_at = now
        return True
