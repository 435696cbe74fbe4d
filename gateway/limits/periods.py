"""UTC days and months, at whose start limits and budgets reset."""

from datetime import UTC, datetime
from typing import Final

DAY_MS: Final = 86_400_000


def day_of(unix_ms: int) -> int:
    """Return the number of days since 1970."""
    return unix_ms // DAY_MS


def day_start_ms(unix_ms: int) -> int:
    """Return the Unix time in milliseconds at the start of the day."""
    return unix_ms - unix_ms % DAY_MS


def month_of(unix_ms: int) -> int:
    """Return the calendar month as YYYYMM."""
    moment = _datetime(unix_ms)
    return moment.year * 100 + moment.month


def month_start_ms(unix_ms: int) -> int:
    """Return the Unix time in milliseconds at the start of the calendar month."""
    today = day_start_ms(unix_ms)
    return today - (_datetime(unix_ms).day - 1) * DAY_MS


def _datetime(unix_ms: int) -> datetime:
    return datetime.fromtimestamp(unix_ms / 1000, UTC)
