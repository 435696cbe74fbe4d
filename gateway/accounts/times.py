"""The present as the database keeps it."""

from datetime import UTC, datetime

from contract import clock


def utc_now() -> datetime:
    """Return the present in UTC, with millisecond precision."""
    return datetime.fromtimestamp(clock.now_ms() / 1000, UTC)
