"""Convert a usage record to a row of the ledger."""

from typing import Any, Final

import msgspec

from gateway.records.times import MAX_MS, to_time
from gateway.records.usage_record import UsageRecord

MAX_INTEGER: Final = 2**63 - 1
"""Largest value of a database column."""
_NUMBERS: Final = (
    *("jobs", "prompt_price", "cached_price", "completion_price"),
    *("prompt_tokens", "cached_tokens", "completion_tokens"),
    *("free_prompt_tokens", "free_cached_tokens", "free_completion_tokens"),
    *("cost_micros", "first_token_ms"),
)


class UnusableRecordError(Exception):
    """The record contains a value that the database cannot store."""


def row_of(record: UsageRecord) -> dict[str, Any]:
    """Return the row's columns. Raises UnusableRecordError."""
    row = {name: _storable(value) for name, value in msgspec.structs.asdict(record).items()}
    created_ms, ended_ms = row.pop("created_ms"), row.pop("ended_ms")
    del row["line"]  # The ledger has its tier.
    row["model"] = _storable(record.full_model)
    del row["adapter"], row["is_ranked"]
    numbers = [row[name] for name in _NUMBERS]
    if not all(0 <= number <= MAX_INTEGER for number in numbers):
        raise UnusableRecordError("a count is negative or too large")
    if not (0 <= created_ms <= MAX_MS and 0 <= ended_ms <= MAX_MS):
        raise UnusableRecordError("a time is out of range")
    return row | {"created_at": to_time(created_ms), "ended_at": to_time(ended_ms)}


def _storable(value: Any) -> Any:
    # PostgreSQL rejects the character NUL in text, but the record must still be stored.
    if type(value) is str and "\0" in value:
        return value.replace("\0", "\N{REPLACEMENT CHARACTER}")
    return value
