"""Wall clock: the only module that reads it, so that tests can replace it in one place."""

import time


def now_seconds() -> int:
    """Return Unix time in whole seconds, the format of OpenAI's `created` fields."""
    return int(time.time())


def now_ms() -> int:
    """Return Unix time in milliseconds, for deadlines that processes send to each other."""
    return time.time_ns() // 1_000_000
