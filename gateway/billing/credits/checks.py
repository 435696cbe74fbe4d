"""Validation of credit amounts, notes and expiry times."""

from datetime import datetime
from typing import Final

from gateway.records.errors import InvalidParameterError, must
from gateway.records.times import in_utc, utc_now

MAX_AMOUNT_MICROS: Final = 10**15
"""One billion dollars: Redis scripts use doubles, which are exact up to 2**53."""
MAX_NOTE_CHARACTERS: Final = 200


def future_expiry(expires_at: datetime | None) -> datetime | None:
    """Return the time in UTC; reject one that is not in the future."""
    if expires_at is None:
        return None
    in_time = in_utc(expires_at, param="expires_at")
    if in_time <= utc_now():
        raise InvalidParameterError(
            f"'expires_at' must be in the future. Given: {in_time.isoformat()}.",
            param="expires_at",
        )
    return in_time


def check_amount(amount_micros: int, *, least: int) -> None:
    """Reject amounts below `least` and amounts that Redis cannot count exactly."""
    if not least <= amount_micros <= MAX_AMOUNT_MICROS:
        rule = f"be an integer from {least} to {MAX_AMOUNT_MICROS}"
        raise must("amount_micros", rule, amount_micros)


def check_note(note: str) -> None:
    """Reject a note that does not fit into a table row."""
    if len(note) > MAX_NOTE_CHARACTERS or not note.isprintable():
        raise must("note", f"have at most {MAX_NOTE_CHARACTERS} printable characters", note)
