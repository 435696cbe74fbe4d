"""Times as the database keeps them: in UTC, to the millisecond."""

from datetime import UTC, datetime, timedelta
from typing import Final

from contract import clock

EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


def utc_now() -> datetime:
    """Return the present in UTC, with millisecond precision."""
    return to_time(clock.now_ms())


def to_time(unix_ms: int) -> datetime:
    """Return a Unix time in milliseconds, without rounding."""
    return EPOCH + timedelta(milliseconds=unix_ms)


def to_ms(time: datetime) -> int:
    """Return a time as Unix time in milliseconds, without rounding."""
    return (time - EPOCH) // timedelta(milliseconds=1)
