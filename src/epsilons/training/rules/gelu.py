"""GELU and its slope in one reading, by a compiled loop in host memory.

    gelu(x) = x·Φ(x),   gelu'(x) = Φ(x) + x·φ(x)

Both take the same exponential. Torch computes it on the way there and again on the way back.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import types
from numba.extending import intrinsic
from numpy.polynomial import chebyshev
from numpy.typing import NDArray
from scipy.special import erfcx
from torch import Tensor

from epsilons.training.compiled import addressable, reordered
from epsilons.training.lanes import SINGLES, Lanes, address, loaded
from epsilons.training.rules.exponential import exponential
from epsilons.training.rules.tiles import LANES
from epsilons.training.threads import go_through, share_out

_LEAST = 2**15  # numbers below which a call costs more than it saves
_STRETCH = 2**12  # numbers that a thread takes at a time
_DENSITY = 1 / math.sqrt(2 * math.pi)  # φ(0)
_BEND = 0.4  # of 1/(1 + _BEND·x), in which Mills' ratio is nearly a line

_Floats = NDArray[Any]
_intrinsic: Any = intrinsic  # numba itself gives the first argument


def _mills(s: Any) -> Any:
    """(1 − Φ(x))/φ(x) at s = 2/(1 + _BEND·x) − 1, which goes from −1 (x = ∞) to 1 (x = 0)."""
    x = (2 / (1 + s) - 1) / _BEND
    return math.sqrt(math.pi / 2) * erfcx(x / math.sqrt(2))


# By powers of s from the highest down: with φ, 1 − Φ to 1.2e-7, as single precision has it.
_MILLS = [float(c) for c in chebyshev.cheb2poly(chebyshev.chebinterpolate(_mills, 8))[::-1]]


def fits(x: Tensor) -> bool:
    """Whether these are numbers that the loop takes, and enough of them."""
    return addressable(x) and x.is_contiguous() and x.numel() >= _LEAST


def gelu(x: Tensor) -> tuple[Tensor, Tensor]:
    """gelu(x) and gelu'(x)."""
    value, slope = x.new_empty(x.shape), x.new_empty(x.shape)
    share_out(-(-x.numel() // _STRETCH), _some, _at_once, x, value, slope)
    return value, slope


@reordered()
def _at_once(threads: int, count: int, *operands: Any) -> Any:
    return go_through(_some, threads, count, operands)


@reordered()
def _some(first: int, last: int, x: _Floats, value: _Floats, slope: _Floats) -> None:
    numbers, values, slopes = x.reshape(-1), value.reshape(-1), slope.reshape(-1)
    start, stop = first * _STRETCH, min(last * _STRETCH, numbers.size)
    whole = stop - (stop - start) % LANES
    for at in range(start, whole, LANES):
        _gelu(numbers, values, slopes, at)
    if whole < stop:
        rest = np.zeros((3, LANES), np.float32)
        rest[0, : stop - whole] = numbers[whole:stop]
        _gelu(rest[0], rest[1], rest[2], 0)
        values[whole:stop] = rest[1, : stop - whole]
        slopes[whole:stop] = rest[2, : stop - whole]


@_intrinsic
def _gelu(typing: Any, numbers: Any, values: Any, slopes: Any, at: Any) -> Any:
    """One vector of each, from place `at` on."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        source, *results = (address(context, builder, SINGLES, a, args[3]) for a in args[:3])
        for found, start in zip(_with_slope(loaded(builder, source, LANES)), results, strict=True):
            found.store(start)
        return context.get_dummy_value()

    return types.void(SINGLES, SINGLES, SINGLES, types.int64), generate


def _with_slope(x: Lanes) -> tuple[Lanes, Lanes]:
    density = exponential(x * x * -0.5) * _DENSITY
    s = x.filled(2.0) / abs(x).fused(_BEND, 1.0) - 1.0
    tail = s.polynomial(_MILLS) * density
    share = x.less(0.0).choose(tail, tail.filled(1.0) - tail)
    return x * share, x.fused(density, share)
