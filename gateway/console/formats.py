"""How pages show amounts, counts, ids and times."""

import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any, Final

from markupsafe import Markup
from msgspec import json

from gateway.records.money import show_dollars
from gateway.records.times import to_ms, utc_now
from gateway.records.usage_record import MICRO

_DIGIT: Final = "\N{FIGURE SPACE}"
"""As wide as a digit."""
_DECIMALS: Final = 6
_SHORT: Final = 6
_LETTERS: Final = ((10**15, "P"), (10**12, "T"), (10**9, "G"), (10**6, "M"), (10**3, "k"))
_BYTES: Final = ((2**50, "PiB"), (2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
_IN_SECONDS: Final = re.compile(r"\bin (\d+\.\d) s\b")
_PARTS: Final = ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s"))


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


def moment(value: datetime, mark: str = " UTC") -> Markup:
    """Return a time in UTC, which scripts show in the zone of the browser, as HTML."""
    shown = show_time(value)
    return Markup(
        '<time class="local" datetime="{}" title="{} UTC">{}</time><span class="utc">{}</span>'
    ).format(value.isoformat(), shown, shown, mark)


def with_times(message: str, at: datetime) -> Markup:
    """Return a message as HTML, with the time that its "in 12.3 s" meant at a moment."""
    return Markup("").join(
        Markup("at {}").format(moment(at + timedelta(seconds=float(part)))) if number % 2 else part
        for number, part in enumerate(_IN_SECONDS.split(message))
    )


def size(value: int) -> str:
    """Return a number of bytes with at most four digits, such as 256 MiB."""
    for unit, name in _BYTES:
        if value >= unit:
            return f"{value / unit:.4g} {name}"
    return f"{value} B"


def duration(milliseconds: float) -> str:
    """Return a time in its two largest units: `250 ms`, `1.25 s`, `4 d 12 h`."""
    if milliseconds < 1000:
        return f"{milliseconds:.0f} ms"
    seconds = int(milliseconds // 1000)
    for (unit, name), (smaller, other) in pairwise(_PARTS):
        if seconds >= unit:
            rest = seconds % unit // smaller
            return f"{seconds // unit} {name}" + (f" {rest} {other}" if rest else "")
    return f"{milliseconds // 10 / 100 if seconds < 10 else milliseconds // 100 / 10:g} s"


def until(value: datetime) -> str:
    """Return the time that remains until a moment, such as `in 4 d 12 h`."""
    seconds = -(-(to_ms(value) - to_ms(utc_now())) // 1000)
    return f"in {duration(seconds * 1000)}" if seconds > 0 else "now"


def details(values: Mapping[str, Any]) -> str:
    """Return the values of an entry of the audit log as text."""
    return "; ".join(f"{name}: {text}" for name, text in _details(values))


def _details(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in values.items():
        words = name.removesuffix("_micros").replace("_", " ")
        match value:
            case None:
                continue
            case Mapping():
                yield from _details({each: "none" if v is None else v for each, v in value.items()})
            case list():
                yield words, ", ".join(map(str, value)) or "none"
            case int() if name.endswith("_micros"):
                yield words, show_dollars(value)
            case str() if name.endswith("_at"):
                yield words, f"{show_time(datetime.fromisoformat(value))} UTC"
            case bool() | float():
                yield words, json.encode(value).decode()
            case int():
                yield words, size(value) if name.endswith("_bytes") else number(value)
            case _:
                yield words, str(value)


def share(part: int, whole: int) -> float:
    """Return a percentage, at most 100."""
    return min(100.0, 100.0 * part / whole) if whole else 100.0


def shortened(name: str) -> str:
    """Return the kind of an id and its last characters."""
    separator = "-" if "-" in name else "_"
    kind, _, rest = name.partition(separator)
    return name if len(rest) <= _SHORT + 1 else f"{kind}{separator}…{rest[-_SHORT:]}"
