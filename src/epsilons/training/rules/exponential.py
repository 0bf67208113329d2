"""exp in single precision, for compiled loops that go through vectors."""

from __future__ import annotations

import math
from typing import Any

from numba import types
from numba.extending import intrinsic

from epsilons.training.lanes import SINGLES, WORD, Lanes, address, folded, loaded, spread
from epsilons.training.rules.tiles import LANES

_LN_2 = 0.693359375, math.log(2.0) - 0.693359375  # the first has few bits
_LEAST, _MOST = -87.0, 88.25  # whose exponentials are normal numbers
_TAYLOR = tuple(1 / math.factorial(k) for k in range(7, -1, -1))
_LARGE = 1.5 * 2**23  # added to a number, it leaves the nearest integer in the last bits
_MANTISSA = 23  # bits, in front of which the exponent stands

_intrinsic: Any = intrinsic  # numba itself gives the first argument


def exponential(y: Lanes) -> Lanes:
    """exp(y) to some 1e-7; y below −87 gives 0, from 88.25 on ∞, and NaN stays NaN.

    exp(y) = 2ⁿ·exp(y − n·ln 2) with n the integer nearest to y/ln 2.
    """
    shifted = y.fused(math.log2(math.e), _LARGE)
    n = shifted - _LARGE
    rest = n.fused(-_LN_2[1], n.fused(-_LN_2[0], y))
    value = rest.polynomial(_TAYLOR)
    doubled = (value.bits() + (shifted.bits() << _MANTISSA)).from_bits()
    known = y.less(_LEAST).choose(0.0, doubled)
    return y.less(_MOST).choose(known, y * math.inf)  # NaN is not less, and stays what it is


@_intrinsic
def exponentials(typing: Any, x: Any, at: Any, count: Any, less: Any) -> Any:
    """Replace x[at + j] by exp(x[at + j] − less), j < `count`; their sum comes back.

    `count` ≥ 1 is a multiple of the lanes.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x, at, count, less = args
        m = spread(builder, less, LANES)

        def step(j: Any, total: Lanes) -> Lanes:
            start = address(context, builder, SINGLES, x, builder.add(at, j))
            value = exponential(loaded(builder, start, LANES) - m)
            value.store(start)
            return total + value

        return folded(builder, count, LANES, m.filled(0.0), step).sum()

    return types.float32(SINGLES, types.int64, types.int64, types.float32), generate


@_intrinsic
def largest(typing: Any, x: Any, at: Any, count: Any) -> Any:
    """The largest of x[at : at + count], where all are numbers; `count` as above."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x, at, count = args

        def numbers(j: Any) -> Lanes:
            return loaded(builder, address(context, builder, SINGLES, x, builder.add(at, j)), LANES)

        def step(j: Any, most: Lanes) -> Lanes:
            its = numbers(j)
            return most.less(its).choose(its, most)

        return folded(builder, count, LANES, numbers(WORD(0)), step).most()

    return types.float32(SINGLES, types.int64, types.int64), generate
