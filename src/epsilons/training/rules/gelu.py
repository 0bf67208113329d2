"""GELU and its slope in one reading, by a compiled loop in host memory.

    gelu(x) = x·Φ(x),   gelu'(x) = Φ(x) + x·φ(x)

Both take the same exponential. Torch computes it on the way there and again on the way back.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.polynomial import chebyshev
from numpy.typing import NDArray
from scipy.special import erfcx
from torch import Tensor

from epsilons.training.compiled import addressable, reordered
from epsilons.training.rules.exponential import exponential
from epsilons.training.threads import go_through, share_out

_LEAST = 2**15  # numbers below which a call costs more than it saves
_STRETCH = 2**12  # numbers that a thread takes at a time
_DENSITY = np.float32(1 / math.sqrt(2 * math.pi))  # φ(0)
_BEND = np.float32(0.4)  # of 1/(1 + _BEND·x), in which Mills' ratio is nearly a line
_ZERO, _ONE, _TWO, _MINUS_HALF = (np.float32(c) for c in (0, 1, 2, -0.5))
_LOW = np.float32(-87)  # whose exponential is nothing beside 1

_Floats = NDArray[Any]


def _mills(s: Any) -> Any:
    """(1 − Φ(x))/φ(x) at s = 2/(1 + _BEND·x) − 1, which goes from −1 (x = ∞) to 1 (x = 0)."""
    x = (2 / (1 + s) - 1) / float(_BEND)
    return math.sqrt(math.pi / 2) * erfcx(x / math.sqrt(2))


# By powers of s from the highest down: with φ, 1 − Φ to 1.2e-7, as single precision has it.
_MILLS = tuple(np.float32(c) for c in chebyshev.cheb2poly(chebyshev.chebinterpolate(_mills, 8)))[
    ::-1
]


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
def _some(first: int, last: int, numbers: _Floats, values: _Floats, slopes: _Floats) -> None:
    x = numbers.reshape(-1)[first * _STRETCH : last * _STRETCH]
    value, slope = values.reshape(-1)[first * _STRETCH :], slopes.reshape(-1)[first * _STRETCH :]
    for j in range(len(x)):
        y = _MINUS_HALF * x[j] * x[j]
        density = exponential(y) * _DENSITY if y > _LOW else _ZERO
        s = _TWO / (_ONE + _BEND * abs(x[j])) - _ONE
        ratio = _MILLS[0]
        for k in range(1, len(_MILLS)):
            ratio = ratio * s + _MILLS[k]
        tail = ratio * density
        share = tail if x[j] < _ZERO else _ONE - tail
        value[j] = x[j] * share
        slope[j] = share + x[j] * density
