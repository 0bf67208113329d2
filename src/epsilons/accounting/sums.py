"""What rounding may add to one example's influence on the released sum, and how large a batch gets.

Sums over examples are taken in float64 and rounded to the noise's grid. The proof is in
`docs/sums.md`.
"""

from __future__ import annotations

import functools
import math
import sys
from typing import Literal

from scipy.stats import binom

from epsilons.accounting import checks

Sums = Literal["float64", "float32"]

_TAIL = 2.0**-120  # how likely a batch may reach its cap, at every step
_EXCESS = 2.0**-80  # of a whole run, up to 2⁴⁰ steps; part of δ
_UNIT = 2.0**-53  # of float64: one operation errs by at most this, relatively
_PARTS = 32  # in units of the clip bound: the most that one example's summands have together
_OPERATIONS = 8  # beside additions: factors, scales, conversions
_UP = 1 + 2.0**-40  # covers the rounding of the formulas below
_GRID_BITS = 32

NORM_ERROR = 1e-4  # more than a norm and what is added can differ, relatively (docs/sums.md)

NOT_COVERED = "floating-point effects of the sum are not covered"


@functools.lru_cache(4096)
def batch_cap(n: int, sample_rate: float) -> int:
    """The most examples that a step takes: n, or what a Poisson draw reaches with P ≤ 2⁻¹²⁰.

    The cap is public, where the number drawn is not. Who joins a draw below the cap keeps within
    it, so that reaching it says nothing about one example.

    >>> batch_cap(60_000, 1024 / 60_000), batch_cap(10, 1.0)
    (1450, 10)
    """
    checks.probability("sample_rate", sample_rate)
    low, high = 0, n  # the least of them with P[as many or more] ≤ 2⁻¹²⁰
    while low < high:
        middle = (low + high) // 2
        if binom.sf(middle - 1, n, sample_rate) <= _TAIL:
            high = middle
        else:
            low = middle + 1
    return low


def delta_within_cap(delta: float) -> float:
    """What is left of δ when batches at their cap are paid for; rounded down.

    >>> delta_within_cap(1e-5) < 1e-5
    True
    """
    if delta <= _EXCESS:
        raise ValueError(
            f"delta={delta:g}; expected more than 2⁻⁸⁰, the chance that any batch is too large"
        )
    return math.nextafter(delta - _EXCESS, 0.0)


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


def grid(std: float) -> float:
    """The grid of noise with standard deviation `std`.

        g = the largest power of two ≤ 2⁻³²·std

    A power of two, so that dividing by it is exact.

    >>> grid(1.5) == 2**-32
    True
    """
    return _grid(float(std))


@functools.lru_cache
def _grid(std: float) -> float:
    checks.positive("std", std)
    _, exponent = math.frexp(std)
    g = math.ldexp(1.0, exponent - 1 - _GRID_BITS)
    if g < sys.float_info.min:
        raise ValueError(f"std={std} is too small for a grid of float64; scale the loss up")
    return g


@functools.lru_cache
def rounding_charge(std: float, dimensions: int) -> float:
    """How much further one example can move the sum once it is rounded to the grid.

        ‖round(s + v) − round(s)‖₂ ≤ ‖v‖₂ + g·√d,      d = `dimensions`, all parameters together

    since rounding to nearest moves the difference by at most g in each of d coordinates. An
    example whose gradient is clipped to z is charged z plus this.

    Guarantee: rounded up. Without noise nothing is rounded: std 0 → 0.

    >>> rounding_charge(std=1.0, dimensions=4) >= 2 * 2**-32
    True
    """
    if std == 0:
        return 0.0
    dimensions = checks.whole("dimensions", dimensions, least=1)
    return grid(std) * math.nextafter(math.sqrt(dimensions), math.inf)


def pass_size(batch_size: float, cap: int, micro_batch: int | None = None) -> int:
    """How many examples every pass of a step takes: `micro_batch`, or room for most Poisson draws.

    About two standard deviations above the expected size, if the cap is not below. A multiple of 8
    or, where that costs little, 32: kernels treat the rest after whole vectors in another way.

    >>> pass_size(1024, 1450), pass_size(20, 20), pass_size(1024, 1450, micro_batch=100)
    (1088, 24, 96)
    """
    room = batch_size + 2 * math.sqrt(batch_size)
    unit = 8 if room < 128 else 32
    size = min(unit * max(1, round(room / unit)), 8 * math.ceil(cap / 8))
    if micro_batch is None or micro_batch >= size:
        return size
    return micro_batch - micro_batch % 8 if micro_batch >= 8 else micro_batch
