"""Gaussian noise on the clipped sum, such that the last bits of the result tell nothing.

A floating-point sum plus floating-point noise betrays the sum: some results occur with one sum and
cannot occur with its neighbour (Mironov 2012). Here sum and noise are whole multiples of a grid g,
and are added as integers.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray
from torch import Tensor

from epsilons.accounting import checks
from epsilons.training.keystream import Keystream

_GRID_BITS = 32
_UNITS_LIMIT = 2**62  # the noise stays below 2³⁷ units, so the total fits into int64
_CHUNK = 1 << 14  # coordinates at a time: their scratch stays in the cache

_Floats = NDArray[np.floating[Any]]


def grid(std: float) -> float:
    """The grid of noise with standard deviation `std`.

        g = the largest power of two ≤ 2⁻³²·std

    A power of two, so that dividing by it is exact.

    >>> grid(1.5) == 2**-32
    True
    """
    std = float(checks.positive("std", std))
    _, exponent = math.frexp(std)
    g = math.ldexp(1.0, exponent - 1 - _GRID_BITS)
    if g < sys.float_info.min:
        raise ValueError(f"std={std} is too small for a grid of float64; scale the loss up")
    return g


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


class GridNoise:
    """Noise from a keystream, on the grid of its standard deviation."""

    def __init__(self, keystream: Keystream) -> None:
        self.keystream = keystream

    def added_to(self, sums: dict[str, Tensor], std: float) -> dict[str, Tensor]:
        """Every sum plus independent N(0, std²) in each coordinate, both on the grid.

            result = g·(round(sum/g) + round(noise/g))        as integers

        round(noise/g) + k = round((noise + g·k)/g) for every integer k: the result is a function
        of (rounded sum) + N(0, std²), hence as private as the Gaussian mechanism whose sensitivity
        is `rounding_charge` above the unrounded one.

        Noise is drawn in the order of `sums` and of each tensor's logical layout. Results have the
        dtype and device of their sums, half precision becoming float32. With `std` 0 the sums come
        back as they are: no noise, no privacy.
        """
        if std == 0:
            return dict(sums)
        g = grid(std)
        exact = {name: _flat(total) for name, total in sums.items()}
        for name, values in exact.items():
            _check_range(name, values, g)
        return {
            name: _like(total, self._noisy(exact[name], std, g)) for name, total in sums.items()
        }

    def _noisy(self, exact: _Floats, std: float, g: float) -> _Floats:
        noisy = np.empty_like(exact)
        for start in range(0, exact.size, _CHUNK):
            part = slice(start, start + _CHUNK)
            units = np.rint(exact[part] * np.float64(1 / g)).astype(np.int64)
            words = self.keystream.words(units.size + units.size % 2)
            units += gaussian_units(words, std / g)[: units.size]
            noisy[part] = units * g
        return noisy


class SecureNoise(GridNoise):
    """Noise that nobody can take away: the key comes from the operating system.

    `keystream` continues an earlier one, e.g. from a checkpoint.
    """

    def __init__(self, keystream: Keystream | None = None) -> None:
        if keystream is not None and keystream.is_seeded:
            raise ValueError("the keystream is seeded, hence not secret; use SeededNoise(seed)")
        super().__init__(Keystream.secret(b"noise") if keystream is None else keystream)


class SeededNoise(GridNoise):
    """The same noise for the same seed, on every machine.

    For experiments. Whoever knows the seed can take the noise away. It differs from `SecureNoise`
    in the key alone.
    """

    def __init__(self, seed: int) -> None:
        super().__init__(Keystream.seeded(seed, b"noise"))


def gaussian_units(words: NDArray[np.uint64], scale: float) -> NDArray[np.int64]:
    """As many independent rounded Gaussians as there are random words, an even number.

        ⌊scale·√(−2 ln u)·cos 2πv + ½⌋ and ⌊scale·√(−2 ln u)·sin 2πv + ½⌋     (Box and Muller 1958)

    with u and v from one 64-bit word each: u from the first half of `words`, v from the second;
    cosines come first. 1 ≤ scale ≤ 2³³ is the standard deviation in units of the grid.

    Precision: u and 1 − u are relatively exact to 2⁻⁵³ down to 2⁻⁶⁵, so values reach 9.49 standard
    deviations; a pair beyond would have probability 2⁻⁶⁵. √·, cos and sin are float64, their
    product is kept to 2⁻⁴⁰ units, and some 2⁷⁰ word pairs share each value near the centre, some
    2⁴⁵ at 8 standard deviations: no value in between is left out.

    Reproducible: made of correctly rounded IEEE 754 operations alone (+, −, ×, ÷, √, floor), none
    of them fused, and of no library function, the result is the same on every machine.

    >>> gaussian_units(np.array([2**63, 0], dtype=np.uint64), scale=2.0**32) / 2**32
    array([1.17741002, 0.        ])
    """
    if words.size % 2:
        raise ValueError(f"{words.size} words make no pairs; give an even number")
    out = np.empty(words.size, dtype=np.int64)
    _box_muller(words, float(scale), out)
    return out


# Taylor coefficients from the highest power down; what follows is below 2⁻⁵⁸ on the range used.
_ATANH = tuple(2.0 / (2 * k + 1) for k in range(10, 0, -1))
_COS = tuple((-1.0) ** k / math.factorial(2 * k) for k in range(8, 0, -1))
_SIN = tuple((-1.0) ** k / math.factorial(2 * k + 1) for k in range(8, 0, -1))
_LN_2 = math.log(2.0)
_ROOT_HALF_BITS = np.float64(math.sqrt(0.5)).view(np.int64)
_HEAD = np.uint64(0xFFFF_FFFF_F800_0000)  # sign, exponent and the first 26 of 53 bits


@njit(cache=True, nogil=True, error_model="numpy")
def _box_muller(words: NDArray, scale: float, out: NDArray) -> None:  # type: ignore[type-arg]
    pairs = words.size // 2
    for i in range(pairs):
        radius = scale * math.sqrt(2.0 * _exponential(words[i]))
        cos, sin = _direction(words[pairs + i])
        out[i] = _nearest(radius, cos)
        out[pairs + i] = _nearest(radius, sin)


@njit(cache=True, nogil=True, error_model="numpy")
def _exponential(word: int) -> float:
    """−ln u for u = (word + ½)/2⁶⁴, relatively exact also where u is near 1.

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
        series = series * square + coefficient
    return -(k * _LN_2 + (2.0 * s + s * square * series))


@njit(cache=True, nogil=True, error_model="numpy")
def _direction(word: int) -> tuple[float, float]:
    """Cosine and sine of a uniform angle: two bits choose the quarter, the rest |φ| ≤ π/4 in it."""
    odd = (word >> np.uint64(62)) & np.uint64(1)
    half = word >> np.uint64(63)
    angle = (np.float64(np.int64(word << np.uint64(2))) + 0.5) * (2.0**-65 * math.pi)
    square = angle * angle
    cos, sin = 0.0, 0.0
    for coefficient in _COS:
        cos = cos * square + coefficient
    for coefficient in _SIN:
        sin = sin * square + coefficient
    cos = 1.0 + square * cos
    sin = angle + angle * square * sin
    across = sin if odd else cos
    up = cos if odd else sin
    return (-across if half ^ odd else across), (-up if half else up)


@njit(cache=True, nogil=True, error_model="numpy")
def _nearest(radius: float, ratio: float) -> np.int64:
    """⌊radius·ratio + ½⌋ of the product before it is rounded to float64.

    A rounded product has so few bits after the point that cells of the grid would differ in
    probability by 2⁻²⁰. So both factors are split in halves whose products are exact.
    """
    radius_head = np.uint64(np.float64(radius).view(np.uint64) & _HEAD).view(np.float64)
    ratio_head = np.uint64(np.float64(ratio).view(np.uint64) & _HEAD).view(np.float64)
    radius_tail = radius - radius_head
    ratio_tail = ratio - ratio_head
    main = radius_head * ratio_head
    whole = np.floor(main)
    rest = radius_head * ratio_tail + radius_tail * ratio_head + radius_tail * ratio_tail
    return np.int64(whole + np.floor((main - whole) + rest + 0.5))


def _flat(total: Tensor) -> _Floats:
    """The coordinates in logical order, in host memory, in at least single precision."""
    wide = torch.promote_types(total.dtype, torch.float32)
    values: _Floats = total.detach().cpu().to(wide).reshape(-1).numpy()
    return values


def _like(total: Tensor, values: _Floats) -> Tensor:
    """`values` with the shape, device and memory format of `total`."""
    result = torch.from_numpy(values).view(total.shape).to(total.device)
    if total.is_contiguous():
        return result
    return torch.empty_like(total, dtype=result.dtype, requires_grad=False).copy_(result)


def _check_range(name: str, values: _Floats, g: float) -> None:
    """A `ValueError` unless the sum is finite and fits the grid; it names no value of the sum."""
    # a NaN is both least and largest, and fails every comparison
    if values.size and not -_UNITS_LIMIT * g < values.min() <= values.max() < _UNITS_LIMIT * g:
        raise ValueError(
            f"{name}: the clipped sum is not finite or exceeds 2⁶²·grid = {_UNITS_LIMIT * g:.3g}. "
            "Drop examples with non-finite gradients, and clip, before adding noise."
        )
