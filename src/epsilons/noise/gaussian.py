"""Rounded Gaussians from random words, in a plain loop that gives the same bits on every machine.

The loop has no branch, so that the compiler may take several numbers at a time; none of the
operations used lets it change a bit by doing so.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit
from numpy.typing import NDArray

_Words = NDArray[np.uint64]

# Taylor coefficients from the highest power down; what follows is below 2⁻⁵⁸ on the range used.
_ATANH = tuple(2.0 / (2 * k + 1) for k in range(10, 0, -1))
_COS = tuple((-1.0) ** k / math.factorial(2 * k) for k in range(8, 0, -1))
_SIN = tuple((-1.0) ** k / math.factorial(2 * k + 1) for k in range(8, 0, -1))

_ROOT_HALF = int(np.float64(math.sqrt(0.5)).view(np.int64))  # its bits
_EXPONENT = 52  # the bit where a float64's exponent begins
_SPLIT = 2.0**27 + 1.0  # Veltkamp: x·_SPLIT gives the upper 26 bits of x


@njit(cache=True, nogil=True, error_model="numpy")
def gaussian_units(words: _Words, scale: float) -> None:
    """Turn an even number of random words into as many independent rounded Gaussians, in place.

        ⌊scale·√(−2 ln u)·cos 2πv + ½⌋ and ⌊scale·√(−2 ln u)·sin 2πv + ½⌋     (Box and Muller 1958)

    with u and v from one 64-bit word each: u from the first half of `words`, v from the second;
    cosines come first. 1 ≤ scale ≤ 2³³ is the standard deviation in units of the grid. They are
    whole numbers below 2³⁷, none of them −0, left in `words` as bits of float64.

    Precision: u and 1 − u are relatively exact to 2⁻⁵³ down to 2⁻⁶⁵, so values reach 9.49 standard
    deviations; a pair beyond would have probability 2⁻⁶⁵. √·, cos and sin are float64, their
    product is kept to 2⁻⁴⁰ units, and some 2⁷⁰ word pairs share each value near the centre, some
    2⁴⁵ at 8 standard deviations: no value in between is left out.

    Reproducible: made of correctly rounded IEEE 754 operations alone (+, −, ×, ÷, √, floor), and of
    no library function, the result is the same on every machine.
    """
    pairs = words.size // 2
    units = words.view(np.float64)
    for i in range(pairs):
        radius = scale * math.sqrt(_squared_radius(words[i]))
        cosine, sine = _direction(words[pairs + i])
        units[i] = _nearest(radius, cosine)
        units[pairs + i] = _nearest(radius, sine)


@njit(cache=True, nogil=True, error_model="numpy")
def _squared_radius(word: np.uint64) -> float:
    """−2 ln u for u = (word + ½)/2⁶⁴, relatively exact also where u is near 1.

    ln u = k·ln 2 + ln(1 + f) with √½ ≤ 1 + f < √2, and ln(1 + f) = 2 artanh(f/(2 + f)).
    """
    bits = np.float64((np.float64(word) + 0.5) * 2.0**-64).view(np.int64)  # of u
    k = (bits - _ROOT_HALF) >> _EXPONENT
    below_one = (np.float64(~word) + 0.5) * 2.0**-64  # 1 − u, which u itself has rounded
    f = -below_one if k == 0 else np.int64(bits - (k << _EXPONENT)).view(np.float64) - 1.0
    s = f / (f + 2.0)
    square = s * s
    series = _ATANH[0]
    for coefficient in _ATANH[1:]:
        series = series * square + coefficient
    log = s * square * series + s * 2.0  # of 1 + f
    return np.float64(k) * (-2.0 * math.log(2.0)) + log * -2.0


@njit(cache=True, nogil=True, error_model="numpy")
def _direction(word: np.uint64) -> tuple[float, float]:
    """Cosine and sine of a uniform angle: two bits choose the quarter, the rest |φ| ≤ π/4 in it."""
    angle = (np.float64(np.int64(word << np.uint64(2))) + 0.5) * (2.0**-65 * math.pi)
    square = angle * angle
    cosine, sine = _COS[0], _SIN[0]
    for coefficient in _COS[1:]:
        cosine = cosine * square + coefficient
    for coefficient in _SIN[1:]:
        sine = sine * square + coefficient
    cosine = cosine * square + 1.0
    sine = angle * square * sine + angle
    odd = (word >> np.uint64(62)) & np.uint64(1)
    half = word >> np.uint64(63)
    across = sine if odd else cosine
    up = cosine if odd else sine
    return (-across if half ^ odd else across), (-up if half else up)


@njit(cache=True, nogil=True, error_model="numpy")
def _nearest(radius: float, ratio: float) -> float:
    """⌊radius·ratio + ½⌋ of the product before it is rounded to float64.

    A rounded product has so few bits after the point that cells of the grid would differ in
    probability by 2⁻²⁰. So both factors are split, and the product of their upper halves is exact.
    """
    spread = radius * _SPLIT
    high = spread - (spread - radius)
    spread = ratio * _SPLIT
    its_high = spread - (spread - ratio)
    product = high * its_high
    rest = high * (ratio - its_high) + (radius - high) * ratio
    whole = float(np.floor(product))
    return whole + float(np.floor((product - whole) + rest + 0.5))
