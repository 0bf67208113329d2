"""exp in single precision, for compiled loops: it runs on several numbers at a time.

As with `tiles`, loops that use it are compiled anew only when their own file changes.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from epsilons.training.compiled import reordered

_LOG2_E = np.float32(math.log2(math.e))
_LN_2 = np.float32(0.693359375), np.float32(math.log(2.0) - 0.693359375)  # the first has few bits
_LEAST, _MOST = np.float32(-87.0), np.float32(88.0)  # whose exponentials are normal numbers
_INFINITY = np.float32(math.inf)
_TAYLOR = tuple(np.float32(1 / math.factorial(k)) for k in range(7, -1, -1))
_LARGE = np.float32(
    1.5 * 2**23
)  # added to a number, it leaves the nearest integer in the last bits

_intrinsic: Any = intrinsic  # numba itself gives the first argument


@reordered(fastmath={"contract"})  # in this order: otherwise a sum would be undone
def exponential(y: Any) -> Any:
    """exp(y) to some 1e-7; y below −87 is taken for that, above 88 for ∞, and NaN stays NaN.

    exp(y) = 2ⁿ·exp(y − n·ln 2) with n the integer nearest to y/ln 2.
    """
    y = _LEAST if y < _LEAST else y
    shifted = y * _LOG2_E + _LARGE
    n = shifted - _LARGE
    rest = y - n * _LN_2[0] - n * _LN_2[1]
    value = _TAYLOR[0]
    for k in range(1, len(_TAYLOR)):
        value = value * rest + _TAYLOR[k]
    value = _INFINITY if y > _MOST else _doubled(value, shifted)
    return y if y != y else value  # the bits of NaN would be taken for an exponent


@_intrinsic
def _doubled(typing: Any, value: Any, shifted: Any) -> Any:
    """value·2ⁿ with n in the last bits of `shifted`: moved to the exponent's place and added."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        whole, number = ir.IntType(32), ir.FloatType()
        bits, powers = (builder.bitcast(arg, whole) for arg in args)
        moved = builder.shl(powers, ir.Constant(whole, 23))
        return builder.bitcast(builder.add(bits, moved), number)

    return types.float32(types.float32, types.float32), generate
