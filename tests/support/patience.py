"""How long tests wait, beside other tests that start engines on the same cores."""

from typing import Final

PATIENCE_SECONDS: Final = 90.0
"""How long a test waits for what must come; only a failure takes that long."""
PROCESS_PATIENCE_SECONDS: Final = 180.0
"""The same where processes start, which takes seconds of processor time that others may have."""
