"""How pages show amounts, counts, ids and times."""

from datetime import UTC, datetime
from typing import Final

from msgspec import json

from gateway.records.money import show_dollars
from gateway.records.usage_record import MICRO

_DIGIT: Final = "\N{FIGURE SPACE}"
"""As wide as a digit."""
_DECIMALS: Final = 6
_SHORT: Final = 6
_LETTERS: Final = ((10**15, "P"), (10**12, "T"), (10**9, "G"), (10**6, "M"), (10**3, "k"))


def number(value: int) -> str:
    """Return a number with separators."""
    return f"{value:,}"


def cents(micros: int) -> str:
    """Return an amount with two decimals from $1 on; smaller ones exactly."""
    whole = MICRO // 100
    if abs(micros) < MICRO:
        return show_dollars(micros)
    rounded = (abs(micros) + whole // 2) // whole * whole
    return show_dollars(rounded if micros > 0 else -rounded)


def padding(amount: str) -> str:
    """Return what puts the points of the amounts of a column at one place."""
    return _DIGIT * (_DECIMALS - len(amount.partition(".")[2]))


def scale_money(micros: int) -> str:
    """Return an amount on the scale of a chart in few characters."""
    if micros < MICRO:
        return f"${micros / MICRO:.{_DECIMALS}f}".rstrip("0").rstrip(".")
    return f"${scale_count(micros / MICRO)}"


def scale_count(value: float) -> str:
    """Return a number on the scale of a chart in few characters."""
    for size, letter in _LETTERS:
        if value >= size:
            return f"{value / size:.15g}{letter}"
    return f"{value:.15g}"


def show_time(value: datetime | None, missing: str = "-") -> str:
    """Return a time in UTC."""
    return missing if value is None else value.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S")


def unix(seconds: int) -> str:
    """Return a Unix time as UTC."""
    return show_time(datetime.fromtimestamp(seconds, UTC))


def plain(value: object) -> str:
    """Return a stored value as JSON, text without quotes."""
    return value if isinstance(value, str) else json.encode(value).decode()


def share(part: int, whole: int) -> float:
    """Return a percentage, at most 100."""
    return min(100.0, 100.0 * part / whole) if whole else 100.0


def shortened(name: str) -> str:
    """Return the kind of an id and its last characters."""
    separator = "-" if "-" in name else "_"
    kind, _, rest = name.partition(separator)
    return name if len(rest) <= _SHORT + 1 else f"{kind}{separator}…{rest[-_SHORT:]}"
