"""Timestamps: in UTC, with millisecond precision, as stored in the database."""

from datetime import UTC, datetime, timedelta
from typing import Final

from common import clock
from gateway.records.errors import InvalidParameterError

EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
MAX_MS: Final = 32_503_680_000_000
"""The year 3000: later times are invalid in the ledger, which has a partition for each month.
"""


def utc_now() -> datetime:
    """Return the current time in UTC, with millisecond precision."""
    return to_time(clock.now_ms())


def to_time(unix_ms: int) -> datetime:
    """Convert a Unix time in milliseconds to a datetime, without rounding."""
    return EPOCH + timedelta(milliseconds=unix_ms)


def to_ms(time: datetime) -> int:
    """Convert a datetime to Unix time in milliseconds, without rounding."""
    return (time - EPOCH) // timedelta(milliseconds=1)


def hour_of(time: datetime) -> datetime:
    """Return the beginning of the hour."""
    return time.replace(minute=0, second=0, microsecond=0)


def day_of(time: datetime) -> datetime:
    """Return the beginning of the day in UTC."""
    return hour_of(time).replace(hour=0)


def month_start(time: datetime) -> datetime:
    """Return the beginning of the month in UTC."""
    return day_of(time.astimezone(UTC)).replace(day=1)


def next_month(time: datetime) -> datetime:
    """Return the beginning of the next month in UTC."""
    return month_start(month_start(time) + timedelta(days=31))


def in_utc(time: datetime, *, param: str) -> datetime:
    """Return an aware time in UTC.

    Raises InvalidParameterError if its year in UTC is out of range.
    """
    try:
        return time.astimezone(UTC)
    except OverflowError:
        raise InvalidParameterError(
            f"'{param}' must be a time in the years 1 to 9999 in UTC.", param=param
        ) from None
