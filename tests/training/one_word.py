"""The transform of `epsilons.training.gaussian` one word at a time: what its blocks must equal."""

import math

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

# Taylor coefficients from the highest power down; what follows is below 2⁻⁵⁸ on the range used.
_ATANH = tuple(2.0 / (2 * k + 1) for k in range(10, 0, -1))
_COS = tuple((-1.0) ** k / math.factorial(2 * k) for k in range(8, 0, -1))
_SIN = tuple((-1.0) ** k / math.factorial(2 * k + 1) for k in range(8, 0, -1))
_LN_2 = math.log(2.0)
_ROOT_HALF_BITS = np.float64(math.sqrt(0.5)).view(np.int64)


@intrinsic
def fused(typing, x, y, z):
    """x·y + z, rounded once."""

    def generate(context, builder, signature, args):
        number = ir.DoubleType()
        kind = ir.FunctionType(number, [number] * 3)
        return builder.call(
            cgutils.get_or_insert_function(builder.module, kind, "llvm.fma.f64"), args
        )

    return types.float64(types.float64, types.float64, types.float64), generate


def gaussian_units(words, scale):
    out = np.empty(words.size, dtype=np.int64)
    _box_muller(words, float(scale), out)
    return out


@njit(error_model="numpy")
def _box_muller(words, scale, out):
    pairs = words.size // 2
    for i in range(pairs):
        radius = scale * math.sqrt(_squared_radius(words[i]))
        cos, sin = _direction(words[pairs + i])
        out[i] = _nearest(radius, cos)
        out[pairs + i] = _nearest(radius, sin)


@njit(error_model="numpy")
def _squared_radius(word: int) -> float:
    """−2 ln u for u = (word + ½)/2⁶⁴, relatively exact also where u is near 1.

    ln u = k·ln 2 + ln(1 + f) with √½ ≤ 1 + f < √2, and ln(1 + f) = 2 artanh(f/(2 + f)).
    """
    u = (np.float64(word) + 0.5) * 2.0**-64
    bits = np.float64(u).view(np.int64)
    k = (bits - _ROOT_HALF_BITS) >> 52
    below_one = (np.float64(~word) + 0.5) * 2.0**-64  # 1 − u, which u itself has rounded
    f = -below_one if k == 0 else np.int64(bits - (k << 52)).view(np.float64) - 1.0
    s = f / (2.0 + f)
    square = s * s
    series = 0.0
    for coefficient in _ATANH:
        series = fused(series, square, coefficient)
    return fused(np.float64(k), -2.0 * _LN_2, -2.0 * fused(s * square, series, 2.0 * s))


@njit(error_model="numpy")
def _direction(word: int) -> tuple[float, float]:
    """Cosine and sine of a uniform angle: two bits choose the quarter, the rest |φ| ≤ π/4 in it."""
    odd = (word >> np.uint64(62)) & np.uint64(1)
    half = word >> np.uint64(63)
    angle = (np.float64(np.int64(word << np.uint64(2))) + 0.5) * (2.0**-65 * math.pi)
    square = angle * angle
    cos, sin = 0.0, 0.0
    for coefficient in _COS:
        cos = fused(cos, square, coefficient)
    for coefficient in _SIN:
        sin = fused(sin, square, coefficient)
    cos = fused(square, cos, 1.0)
    sin = fused(angle * square, sin, angle)
    across = sin if odd else cos
    up = cos if odd else sin
    return (-across if half ^ odd else across), (-up if half else up)


@njit(error_model="numpy")
def _nearest(radius: float, ratio: float) -> np.int64:
    """⌊radius·ratio + ½⌋ of the product before it is rounded to float64.

    A rounded product has so few bits after the point that cells of the grid would differ in
    probability by 2⁻²⁰. So what rounding took from it is added again.
    """
    product = radius * ratio
    whole = np.floor(product)
    return np.int64(whole + np.floor((product - whole) + fused(radius, ratio, -product) + 0.5))
