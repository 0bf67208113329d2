"""Correlation coefficients that know when there is none."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def pearson(x: NDArray[np.float64], y: NDArray[np.float64]) -> float | None:
    """Pearson's r; None of fewer than two pairs, or if x or y is constant."""
    if len(x) < 2 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return None
    return float(np.corrcoef(x, y)[0, 1])


def spearman(x: NDArray[np.float64], y: NDArray[np.float64]) -> float | None:
    """Spearman's ρ: Pearson's r of the ranks, ties at their mean rank."""
    from scipy.stats import rankdata  # here, since it takes half a second to load

    return pearson(rankdata(x), rankdata(y))
