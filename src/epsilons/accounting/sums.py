"""What the floating-point sum of a batch may add to an example's influence, and how large it gets.

Sums over examples are taken in float64. The proof is in `docs/sums.md`.
"""

from __future__ import annotations

import functools
import math
from typing import Literal

from scipy.stats import binom

from epsilons.accounting import checks

Sums = Literal["float64", "float32"]

_TAIL = 2.0**-80  # how likely a batch may exceed its cap, at every step
_UNIT = 2.0**-53  # of float64: one operation errs by at most this, relatively
_PARTS = 32  # in units of the clip bound: the most that one example's summands have together
_OPERATIONS = 8  # beside additions: factors, scales, conversions
_UP = 1 + 2.0**-40  # covers the rounding of the formulas below

NOT_COVERED = "floating-point effects of the sum are not covered"


@functools.lru_cache(4096)
def batch_cap(n: int, sample_rate: float) -> int:
    """The most examples that a step takes: a Poisson draw has more with probability ≤ 2⁻⁸⁰.

    The cap is public, where the number drawn is not.

    >>> batch_cap(60_000, 1024 / 60_000), batch_cap(10, 1.0)
    (1379, 10)
    """
    checks.probability("sample_rate", sample_rate)
    low, high = 0, n  # the least of them with P[more] ≤ 2⁻⁸⁰
    while low < high:
        middle = (low + high) // 2
        if binom.sf(middle, n, sample_rate) <= _TAIL:
            high = middle
        else:
            low = middle + 1
    return low


def cap_excess(steps: int) -> float:
    """How likely any of so many steps has a batch above its cap, at most: it is part of δ."""
    return steps * _TAIL


def sum_remainder(cap: int, max_grad_norm: float) -> float:
    """How much further than its clipped gradient one example can move a float64 sum.

        2·γ·32·B·C,     γ = K·2⁻⁵³ / (1 − K·2⁻⁵³),   K = 2·B + 8

    for at most B = `cap` examples in at most as many passes, whose summands are at most 32·C
    together for each example: see `docs/sums.md`.

    Guarantee: rounded up.

    >>> sum_remainder(batch_cap(10**6, 0.016384), max_grad_norm=1.0) < 1e-5
    True
    """
    terms = (2 * cap + _OPERATIONS) * _UNIT
    return 2 * terms / (1 - terms) * _PARTS * cap * max_grad_norm * _UP


def pass_size(batch_size: float) -> int:
    """How many examples one pass takes by default: two standard deviations above the expectation.

    A multiple of 8, as kernels like it. Most Poisson draws then fit into one pass.

    >>> pass_size(1024), pass_size(20)
    (1088, 32)
    """
    return 8 * math.ceil((batch_size + 2 * math.sqrt(batch_size)) / 8)
