"""Histogram of the times to the first token: fixed buckets, so that histograms can be added."""

from collections.abc import Sequence
from typing import Final

BOUNDS_MS: Final = tuple(round(2 ** (3 + step / 2)) for step in range(35))
"""Upper bounds of the buckets, inclusive: 41 % apart, from 8 ms to 17 minutes.

One more bucket counts longer times. Each bucket is a column of the database, so that another bound
needs a migration.
"""


def quantile_ms(counts: Sequence[int], percent: int) -> int | None:
    """Return the time that this percentage of the requests did not exceed, in milliseconds.

    It is interpolated within its bucket. Longer times than the last bound count as that bound.
    Returns None without requests.

    Args:
        counts: Requests in each bucket, the last one included.
        percent: From 1 to 100.
    """
    wanted, before, low = sum(counts) * percent / 100, 0, 0
    if not wanted:
        return None
    for count, high in zip(counts, (*BOUNDS_MS, BOUNDS_MS[-1]), strict=True):
        if before + count >= wanted:
            return max(round(low + (high - low) * (wanted - before) / count), 1)
        before, low = before + count, high
    return BOUNDS_MS[-1]
