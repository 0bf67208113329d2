"""Rounded Gaussians from random words, sixteen pairs at a time in registers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit, types
from numba.extending import intrinsic
from numpy.typing import NDArray

from epsilons.training.lanes import WORDS, Lanes, address, loaded, spread

_Words = NDArray[np.uint64]

# Several registers wide, so that no operation waits for the one before it.
_LANES = 16

# Taylor coefficients from the highest power down; what follows is below 2⁻⁵⁸ on the range used.
_ATANH = tuple(2.0 / (2 * k + 1) for k in range(10, 0, -1))
_COS = tuple((-1.0) ** k / math.factorial(2 * k) for k in range(8, 0, -1))
_SIN = tuple((-1.0) ** k / math.factorial(2 * k + 1) for k in range(8, 0, -1))

# Bits of float64
_SIGN = 1 << 63
_EXPONENT = 52  # where the exponent begins
_BINADE = 1 << 52  # from x to 2x


def _bits(x: float) -> int:
    return int(np.float64(x).view(np.uint64))


_intrinsic: Any = intrinsic  # numba itself gives the first argument


@njit(cache=True, nogil=True, error_model="numpy")
def gaussian_units(words: _Words, scale: float) -> None:
    """Turn random words, an even number, into as many independent rounded Gaussians, in place.

        ⌊scale·√(−2 ln u)·cos 2πv + ½⌋ and ⌊scale·√(−2 ln u)·sin 2πv + ½⌋     (Box and Muller 1958)

    with u and v from one 64-bit word each: u from the first half of `words`, v from the second;
    cosines come first. 1 ≤ scale ≤ 2³³ is the standard deviation in units of the grid. They are
    whole numbers below 2³⁷, none of them −0, left in `words` as bits of float64.

    Precision: u and 1 − u are relatively exact to 2⁻⁵³ down to 2⁻⁶⁵, so values reach 9.49 standard
    deviations; a pair beyond would have probability 2⁻⁶⁵. √·, cos and sin are float64, their
    product is kept to 2⁻⁴⁰ units, and some 2⁷⁰ word pairs share each value near the centre, some
    2⁴⁵ at 8 standard deviations: no value in between is left out.

    Reproducible: made of correctly rounded IEEE 754 operations alone (+, −, ×, ÷, √, floor, and
    products and sums fused where said), and of no library function, the result is the same on
    every machine.
    """
    pairs = words.size // 2
    whole = pairs - pairs % _LANES
    for at in range(0, whole, _LANES):
        _transform(words, at, pairs + at, scale)
    rest = pairs - whole
    if rest:
        scratch = np.zeros(2 * _LANES, np.uint64)
        scratch[:rest] = words[whole:pairs]
        scratch[_LANES : _LANES + rest] = words[pairs + whole :]
        _transform(scratch, 0, _LANES, scale)
        words[whole:pairs] = scratch[:rest]
        words[pairs + whole :] = scratch[_LANES : _LANES + rest]


@_intrinsic
def _transform(typing: Any, words: Any, first: Any, second: Any, scale: Any) -> Any:
    """Replace the words u at `first` and v at `second` by cosines and sines, as many as lanes."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        starts = [address(context, builder, WORDS, args[0], at) for at in args[1:3]]
        u, v = (loaded(builder, start, _LANES) for start in starts)
        radius = _radii(u) * spread(builder, args[3], _LANES)
        for direction, start in zip(_directions(v), starts, strict=True):
            _nearest(radius, direction).store(start)
        return context.get_dummy_value()

    return types.void(WORDS, types.int64, types.int64, types.float64), generate


def _radii(words: Lanes) -> Lanes:
    """√(−2 ln u) for u = (word + ½)/2⁶⁴, relatively exact also where u is near 1.

    ln u = k·ln 2 + ln(1 + f) with √½ ≤ 1 + f < √2, and ln(1 + f) = 2 artanh(f/(2 + f)).
    """
    bits = (words.unsigned() + 0.5).bits()  # of 2⁶⁴·u
    binade = (bits - (_bits(math.sqrt(0.5)) - _BINADE)) >> _EXPONENT  # k + 65
    k = (binade | _bits(2.0**52)).from_bits() - (2.0**52 + 65.0)
    one_plus_f = (bits - (binade << _EXPONENT) + _BINADE).from_bits()
    near_one = ((~words).unsigned() + 0.5) * -(2.0**-64)  # u − 1, which u itself has rounded
    f = binade.equals(65).choose(near_one, one_plus_f - 1.0)
    s = f / (f + 2.0)
    square = s * s
    log = (s * square).fused(square.polynomial(_ATANH), s * 2.0)  # of 1 + f
    return k.fused(-2.0 * math.log(2.0), log * -2.0).root()


def _directions(words: Lanes) -> tuple[Lanes, Lanes]:
    """Cosine and sine of a uniform angle: two bits choose the quarter, the rest |φ| ≤ π/4 in it."""
    angle = ((words << 2).signed() + 0.5) * (2.0**-65 * math.pi)
    square = angle * angle
    cos = square.fused(square.polynomial(_COS), 1.0)
    sin = (angle * square).fused(square.polynomial(_SIN), angle)
    odd = (words << 1) & _SIGN
    half = words & _SIGN
    across = odd.equals(0).choose(cos, sin).bits() ^ half ^ odd
    up = odd.equals(0).choose(sin, cos).bits() ^ half
    return across.from_bits(), up.from_bits()


def _nearest(radius: Lanes, ratio: Lanes) -> Lanes:
    """⌊radius·ratio + ½⌋ of the product before it is rounded to float64.

    A rounded product has so few bits after the point that cells of the grid would differ in
    probability by 2⁻²⁰. So what rounding took from it is added again.
    """
    product = radius * ratio
    lost = radius.fused(ratio, -product)
    whole = product.floor()
    return whole + ((product - whole) + lost + 0.5).floor()
