"""How long tests wait, beside other tests that start engines on the same cores."""

from typing import Final

PATIENCE_SECONDS: Final = 30.0
"""How long a test waits for what must come; only a failure takes that long."""
PROCESS_PATIENCE_SECONDS: Final = 90.0
"""The same where processes start, which takes seconds of processor time that others may have."""
CROWDED_SECONDS: Final = 5.0


def crowded(seconds: float) -> float:
    """Return what something may take on a crowded machine that takes at most `seconds` on a quiet one.

    For bounds that are promised. They still tell apart what comes at once and what comes with a time-out
    or by a refresh, as these are longer.
    """
    return seconds + CROWDED_SECONDS
