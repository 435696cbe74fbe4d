"""Timeouts of tests, on cores that other tests and engines use too."""

from typing import Final

PATIENCE_SECONDS: Final = 90.0
"""Timeout of a wait for an event; only a failure takes that long."""
PROCESS_PATIENCE_SECONDS: Final = 180.0
"""The same for process starts, which take seconds of CPU time."""
OPENING_PATIENCE_SECONDS: Final = 8.0
"""For streams that begin at once; others begin after ten seconds of silence (`commit_after`)."""
