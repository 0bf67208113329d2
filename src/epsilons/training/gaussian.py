"""Rounded Gaussians from random words.

Words are worked off in blocks, by short loops over arrays. No loop branches or converts between
integers and floats, so that compilers run it on several words at a time; none has a long chain of
operations that wait for each other.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit
from numpy.typing import NDArray

_Words = NDArray[np.uint64]
_Floats = NDArray[np.float64]
_compiled = njit(cache=True, nogil=True, error_model="numpy")

_BLOCK = 512  # pairs at a time: their scratch of 28 KiB stays in the cache

# Taylor coefficients from the highest power down; what follows is below 2⁻⁵⁸ on the range used.
_ATANH = tuple(2.0 / (2 * k + 1) for k in range(10, 0, -1))
_COS = tuple((-1.0) ** k / math.factorial(2 * k) for k in range(8, 0, -1))
_SIN = tuple((-1.0) ** k / math.factorial(2 * k + 1) for k in range(8, 0, -1))
_LN_2 = math.log(2.0)

# Bits of float64
_SIGN = np.uint64(1 << 63)
_EXPONENT = np.uint64(52)  # where the exponent begins
_BINADE = np.uint64(1 << 52)  # from x to 2x
_HEAD = np.uint64(0xFFFF_FFFF_F800_0000)  # sign, exponent and the first 26 of 53 bits
_BITS_OF_2_52 = np.float64(2.0**52).view(np.uint64)
_BITS_OF_2_84 = np.float64(2.0**84).view(np.uint64)
_BITS_OF_ROOT_HALF = np.float64(math.sqrt(0.5)).view(np.uint64)


@_compiled
def gaussian_units(words: _Words, scale: float, out: _Floats) -> None:
    """As many independent rounded Gaussians as there are random words, an even number.

        ⌊scale·√(−2 ln u)·cos 2πv + ½⌋ and ⌊scale·√(−2 ln u)·sin 2πv + ½⌋     (Box and Muller 1958)

    with u and v from one 64-bit word each: u from the first half of `words`, v from the second;
    cosines come first. 1 ≤ scale ≤ 2³³ is the standard deviation in units of the grid. They are
    whole numbers below 2³⁷, none of them −0, written to `out`: also to the memory of `words`.

    Precision: u and 1 − u are relatively exact to 2⁻⁵³ down to 2⁻⁶⁵, so values reach 9.49 standard
    deviations; a pair beyond would have probability 2⁻⁶⁵. √·, cos and sin are float64, their
    product is kept to 2⁻⁴⁰ units, and some 2⁷⁰ word pairs share each value near the centre, some
    2⁴⁵ at 8 standard deviations: no value in between is left out.

    Reproducible: made of correctly rounded IEEE 754 operations alone (+, −, ×, ÷, √, floor), none
    of them fused, and of no library function, the result is the same on every machine.
    """
    pairs = words.size // 2
    scratch = np.empty((7, _BLOCK))
    for start in range(0, pairs, _BLOCK):
        n = min(_BLOCK, pairs - start)
        u, v = words[start : start + n], words[pairs + start : pairs + start + n]
        radius, cos, sin = scratch[0, :n], scratch[1, :n], scratch[2, :n]
        _radii(u, scale, radius, scratch[3:])
        _directions(v, cos, sin, scratch[3:])
        first, second = out[start : start + n], out[pairs + start : pairs + start + n]
        for i in range(n):
            first[i] = _nearest(radius[i], cos[i])
            second[i] = _nearest(radius[i], sin[i])


@_compiled
def _radii(words: _Words, scale: float, radius: _Floats, scratch: _Floats) -> None:
    """scale·√(−2 ln u) for u = (word + ½)/2⁶⁴, relatively exact also where u is near 1.

    ln u = k·ln 2 + ln(1 + f) with √½ ≤ 1 + f < √2, and ln(1 + f) = 2 artanh(f/(2 + f)).
    """
    n = words.size
    k, f, s, square = scratch[0, :n], scratch[1, :n], scratch[2, :n], scratch[3, :n]
    for i in range(n):
        bits = _bits(_unsigned(words[i]) + 0.5)  # of 2⁶⁴·u
        binade = (bits - _BITS_OF_ROOT_HALF + _BINADE) >> _EXPONENT  # k + 65
        k[i] = _from_bits(binade | _BITS_OF_2_52) - (2.0**52 + 65.0)
        one_plus_f = _from_bits(bits - (binade << _EXPONENT) + _BINADE)
        near_one = (_unsigned(~words[i]) + 0.5) * -(2.0**-64)  # u − 1, which u itself has rounded
        f[i] = near_one if binade == np.uint64(65) else one_plus_f - 1.0
    for i in range(n):
        s[i] = f[i] / (2.0 + f[i])
        square[i] = s[i] * s[i]
    series = f
    _polynomial(_ATANH[:5], _ATANH[5:], square, series)
    for i in range(n):
        minus_ln = -(k[i] * _LN_2 + (2.0 * s[i] + s[i] * square[i] * series[i]))
        radius[i] = scale * math.sqrt(2.0 * minus_ln)


@_compiled
def _directions(words: _Words, across: _Floats, up: _Floats, scratch: _Floats) -> None:
    """Cosine and sine of a uniform angle: two bits choose the quarter, the rest |φ| ≤ π/4 in it."""
    n = words.size
    angle, square, cosine, sine = scratch[0, :n], scratch[1, :n], scratch[2, :n], scratch[3, :n]
    for i in range(n):
        angle[i] = (_signed(words[i] << np.uint64(2)) + 0.5) * (2.0**-65 * math.pi)
        square[i] = angle[i] * angle[i]
    _polynomial(_COS[:4], _COS[4:], square, cosine)
    _polynomial(_SIN[:4], _SIN[4:], square, sine)
    for i in range(n):
        odd = (words[i] << np.uint64(1)) & _SIGN
        half = words[i] & _SIGN
        cos = 1.0 + square[i] * cosine[i]
        sin = angle[i] + angle[i] * square[i] * sine[i]
        across[i] = _from_bits(_bits(sin if odd else cos) ^ half ^ odd)
        up[i] = _from_bits(_bits(cos if odd else sin) ^ half)


@_compiled
def _polynomial(
    high: tuple[float, ...], low: tuple[float, ...], x: _Floats, value: _Floats
) -> None:
    """The polynomial with coefficients `high` and then `low`, by Horner's rule in two loops."""
    for i in range(x.size):
        total = high[0]
        for coefficient in high[1:]:
            total = total * x[i] + coefficient
        value[i] = total
    for i in range(x.size):
        total = value[i]
        for coefficient in low:
            total = total * x[i] + coefficient
        value[i] = total


@_compiled
def _nearest(radius: float, ratio: float) -> float:
    """⌊radius·ratio + ½⌋ of the product before it is rounded to float64.

    A rounded product has so few bits after the point that cells of the grid would differ in
    probability by 2⁻²⁰. So both factors are split in halves whose products are exact.
    """
    radius_head = _from_bits(_bits(radius) & _HEAD)
    ratio_head = _from_bits(_bits(ratio) & _HEAD)
    radius_tail = radius - radius_head
    ratio_tail = ratio - ratio_head
    main = radius_head * ratio_head
    whole = np.floor(main)
    rest = radius_head * ratio_tail + radius_tail * ratio_head + radius_tail * ratio_tail
    return float(whole + np.floor((main - whole) + rest + 0.5))


@_compiled
def _unsigned(word: np.uint64) -> float:
    """float64(word), rounded once.

    A 32-bit half h is exact as the last bits of 2⁵² + h and of 2⁸⁴ + 2³²·h.
    """
    high = _from_bits((word >> np.uint64(32)) | _BITS_OF_2_84)
    low = _from_bits((word & np.uint64(0xFFFF_FFFF)) | _BITS_OF_2_52)
    return (high - (2.0**84 + 2.0**52)) + low


@_compiled
def _signed(word: np.uint64) -> float:
    """float64 of the word as a signed integer, rounded once; flipping the sign adds 2⁶³."""
    high = _from_bits(((word ^ _SIGN) >> np.uint64(32)) | _BITS_OF_2_84)
    low = _from_bits((word & np.uint64(0xFFFF_FFFF)) | _BITS_OF_2_52)
    return (high - (2.0**84 + 2.0**63 + 2.0**52)) + low


@_compiled
def _bits(x: float) -> np.uint64:
    return np.float64(x).view(np.uint64)


@_compiled
def _from_bits(bits: np.uint64) -> float:
    return np.uint64(bits).view(np.float64)
