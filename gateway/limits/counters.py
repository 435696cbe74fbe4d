"""Accounts of holders of limits in Redis, and the UTC days and months whose usage they count.

An account is packed into big-endian doubles in its field `n`. One packed field costs Redis a
fraction of ten fields with texts. Doubles are exact up to 2**53. Seconds of audio, which few
requests have, are in a field of their own, `a`: day, settled and reserved seconds.
"""

import math
import struct
from datetime import UTC, datetime
from typing import Final, NamedTuple

from gateway.records.limits import SubjectLimits

DAY_MS: Final = 86_400_000
ACCOUNT_MS: Final = 40 * DAY_MS
"""How long an account is kept after the last change."""


class Period(NamedTuple):
    """A month, or the window of a spend limit, in which an account counts the cost."""

    number: int
    """What an account stores as its month: YYYYMM, or when a window begins as Unix time."""
    start_ms: int
    end_ms: int

    def contains(self, unix_ms: int) -> bool:
        """Return whether it contains a moment."""
        return self.start_ms <= unix_ms < self.end_ms


def period_of(subject: SubjectLimits, unix_ms: int) -> Period | None:
    """Return the period that a subject counts at a moment; None outside the known windows."""
    if subject.spending is None:
        start = month_start_ms(unix_ms)
        return Period(month_of(unix_ms), start, month_start_ms(start + 31 * DAY_MS))
    window = subject.spending.window_at(unix_ms)
    if window is None:
        return None
    start, end = window
    return Period(start, start * 1000, end * 1000)


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


FIELD: Final = "n"
AUDIO_FIELD: Final = "a"
_AUDIO: Final = struct.Struct(">3d")
_FORMAT: Final = struct.Struct(">10d")


class AccountNumbers(NamedTuple):
    """Usage of a day and a month as `periods` counts them, and the part that is only reserved."""

    day: int = 0
    month: int = 0
    requests: int = 0
    """Settled requests of the day."""
    tokens: int = 0
    """Settled tokens of the day."""
    cost_micros: int = 0
    """Settled cost of the month."""
    reserved_requests: int = 0
    reserved_tokens: int = 0
    reserved_micros: int = 0
    """Of the month."""
    credit_micros: int | None = None
    """Credit before reservations; None if none is derived."""
    reserved_credit_micros: int = 0
    audio_seconds: int = 0
    """Settled seconds of audio of the day. They are apart from the packed numbers."""
    reserved_audio_seconds: int = 0

    def encode(self) -> bytes:
        """Return the field's value."""
        return _FORMAT.pack(*(math.inf if value is None else value for value in self[:-2]))

    @classmethod
    def decode(cls, packed: bytes, audio: bytes | None = None) -> "AccountNumbers":
        """Read the value of the field, and of AUDIO_FIELD. Raises struct.error."""
        numbers = [None if value == math.inf else int(value) for value in _FORMAT.unpack(packed)]
        day, *seconds = map(int, _AUDIO.unpack(audio)) if audio else (0, 0, 0)
        return cls._make([*numbers, *(seconds if day == numbers[0] else (0, 0))])
