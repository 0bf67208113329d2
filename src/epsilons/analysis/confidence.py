"""Numbers with their uncertainty: 95 % intervals for means and for shares."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

CONFIDENCE = 0.95
RESAMPLES = 1000
# Resampled positions in memory at a time: 32 MiB.
_MOST_POSITIONS = 2**22


class Interval(NamedTuple):
    """Where a number lies with 95 % confidence: between `low` and `high`."""

    low: float
    high: float


def share_interval(count: float, n: float) -> Interval:
    """Wilson's interval for a share of which `count` of n were seen; (0, 1) if n = 0.

        (p̂ + z²/2n ± z √(p̂(1 − p̂)/n + z²/4n²)) / (1 + z²/n)          (Wilson 1927)

    >>> low, high = share_interval(10, 10)
    >>> round(low, 4), high
    (0.7225, 1.0)
    """
    if n == 0:
        return Interval(0.0, 1.0)
    z2 = float(ndtri((1 + CONFIDENCE) / 2)) ** 2
    share = count / n
    middle = share + z2 / (2 * n)
    reach = math.sqrt(z2 * (share * (1 - share) / n + z2 / (4 * n * n)))
    low, high = ((middle + sign * reach) / (1 + z2 / n) for sign in (-1, 1))
    # the ends are exact where every one was seen, or none; rounding may miss them
    return Interval(0.0 if count == 0 else max(low, 0.0), 1.0 if count == n else min(high, 1.0))


def resampled_means(
    values: NDArray[np.float64], generator: np.random.Generator, resamples: int = RESAMPLES
) -> NDArray[np.float64]:
    """Means (resamples,) of as many values drawn with replacement (the bootstrap)."""
    n = len(values)
    means = np.empty(resamples)
    rows = max(1, _MOST_POSITIONS // n)
    for first in range(0, resamples, rows):
        some = slice(first, min(first + rows, resamples))
        drawn = generator.integers(0, n, size=(some.stop - first, n), dtype=np.uint32)
        means[some] = values[drawn].mean(axis=1)
    return means


def percentiles(resampled: NDArray[np.float64]) -> Interval:
    """The percentile interval of resampled statistics."""
    tail = (1 - CONFIDENCE) / 2
    # Not interpolated: between a finite value and ∞ there is none.
    low, high = np.quantile(resampled, [tail, 1 - tail], method="nearest")
    return Interval(float(low), float(high))
