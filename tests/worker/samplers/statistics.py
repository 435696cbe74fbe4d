"""Tests whether counts fit a distribution."""

import math
from collections.abc import Sequence

import numpy as np

from tests.worker.samplers.reference import Logits

_DEVIATIONS = 4.0


def chi_square_is_likely(counts: Sequence[int], probabilities: Logits) -> bool:
    """Pearson's test, four standard deviations wide; tokens of no probability must not occur."""
    observed = np.array(counts, dtype=np.float64)
    possible = probabilities > 0
    if observed[~possible].any():
        return False
    expected = probabilities[possible] * observed.sum()
    statistic = float((np.square(observed[possible] - expected) / expected).sum())
    freedom = max(len(expected) - 1, 1)
    # Wilson and Hilferty: the cube root of the statistic is nearly normal.
    spread = 2.0 / (9.0 * freedom)
    normal = (math.cbrt(statistic / freedom) - (1.0 - spread)) / math.sqrt(spread)
    return normal < _DEVIATIONS
