"""The only place that reads the wall clock, so that tests and reviewers know where time comes from."""

import time


def now_seconds() -> int:
    """Return Unix time in whole seconds, as OpenAI's `created` fields want it."""
    return int(time.time())


def now_ms() -> int:
    """Return Unix time in milliseconds, for deadlines that travel between processes."""
    return time.time_ns() // 1_000_000
