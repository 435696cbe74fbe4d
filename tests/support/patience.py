"""Timeouts of tests, on cores that other tests and engines use too."""

from typing import Final

PATIENCE_SECONDS: Final = 90.0
"""Timeout of a wait for an event; only a failure takes that long."""
PROCESS_PATIENCE_SECONDS: Final = 180.0
"""The same for process starts, which take seconds of CPU time."""
