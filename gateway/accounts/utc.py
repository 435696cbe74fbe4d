"""Convert user timestamps to UTC."""

from datetime import UTC, datetime

from gateway.errors import InvalidParameterError


def in_utc(time: datetime, *, param: str) -> datetime:
    """Return an aware time in UTC.

    Raises InvalidParameterError if its year in UTC is out of range.
    """
    try:
        return time.astimezone(UTC)
    except OverflowError:
        raise InvalidParameterError(
            f"'{param}' must be a time of the years 1 to 9999 in UTC.", param=param
        ) from None
