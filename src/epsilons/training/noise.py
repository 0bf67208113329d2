"""Gaussian noise on the clipped sum, such that the last bits of the result tell nothing.

A floating-point sum plus floating-point noise betrays the sum: some results occur with one sum and
cannot occur with its neighbour (Mironov 2012). Here sum and noise are whole multiples of a grid g,
and are added as integers.
"""

from __future__ import annotations

import functools
import math
import sys
from typing import Any

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray
from torch import Tensor

from epsilons.accounting import checks
from epsilons.training.gaussian import gaussian_units
from epsilons.training.keystream import Keystream
from epsilons.training.threads import go_through, share_out

_GRID_BITS = 32
_UNITS_LIMIT = 2.0**62  # the noise stays below 2³⁷ units, so the total fits into int64
_CHUNK = 1 << 14  # coordinates that one thread takes at a time: they stay in its cache
_BLOCK = 16 * _CHUNK  # coordinates whose random words are drawn together

_Words = NDArray[np.uint64]
_Floats = NDArray[np.floating[Any]]
_Counts = NDArray[np.int64]


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
        noisy = {name: np.empty_like(values) for name, values in exact.items()}
        begin = self.keystream.position
        largest = max(map(len, exact.values()), default=0)
        scratch = np.empty(min(_BLOCK, _words_for(largest)), np.uint64)
        for name, values in exact.items():
            for start in range(0, values.size, _BLOCK):
                part, to = (a[start : start + _BLOCK] for a in (values, noisy[name]))
                words = self.keystream.fill(scratch[: _words_for(part.size)])
                if _add_noise(words, std / g, part, g, to):
                    self.keystream.seek(begin)  # what was drawn goes no further than here
                    raise _out_of_range(name, g)
        return {name: _like(total, noisy[name]) for name, total in sums.items()}


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


def _add_noise(words: _Words, scale: float, exact: _Floats, g: float, noisy: _Floats) -> bool:
    """Noise for a block, the same on any number of threads; `words` is used up.

    Returns whether a sum doesn't fit the grid: then `noisy` means nothing.
    """
    chunks = -(-exact.size // _CHUNK)
    outside = np.zeros(chunks, np.int64)
    share_out(chunks, _some, _at_once, words, scale, exact, g, noisy, outside)
    return bool(outside.any())


@njit(cache=True, nogil=True, error_model="numpy")
def _at_once(threads: int, count: int, *operands: Any) -> Any:
    return go_through(_some, threads, count, operands)


@njit(cache=True, nogil=True, error_model="numpy")
def _some(
    first: int,
    last: int,
    words: _Words,
    scale: float,
    exact: _Floats,
    g: float,
    noisy: _Floats,
    outside: _Counts,
) -> None:
    """Some chunks; how many sums of each don't fit goes to `outside`."""
    for chunk in range(first, last):
        begin, end = chunk * _CHUNK, min((chunk + 1) * _CHUNK, exact.size)
        its = words[begin : end + end % 2]
        units = its.view(np.float64)
        gaussian_units(its, scale, units)
        outside[chunk] = _add_units(exact[begin:end], units, g, noisy[begin:end])


@njit(cache=True, nogil=True, error_model="numpy")
def _add_units(exact: _Floats, units: _Floats, g: float, noisy: _Floats) -> int:
    """g·(round(sum/g) + units), the integers added exactly and then rounded once to float64.

    Both integers are float64 without error, and IEEE 754 rounds their exact total. Returns how
    many sums are not below the limit, in size; NaN never is.
    """
    per_unit = 1.0 / g
    outside = 0
    for i in range(exact.size):
        whole = np.rint(exact[i] * per_unit)
        noisy[i] = (whole + units[i]) * g
        outside += 0 if abs(whole) < _UNITS_LIMIT else 1
    return outside


def _words_for(coordinates: int) -> int:
    """How many random words coordinates take: a pair of them makes two values."""
    return coordinates + coordinates % 2


def _flat(total: Tensor) -> _Floats:
    """The coordinates in logical order, in host memory, in at least single precision."""
    if total.is_complex():
        raise ValueError("a sum is complex; expected real ones: torch.view_as_real(…)")
    wide = torch.promote_types(total.dtype, torch.float32)
    values: _Floats = total.detach().to("cpu", wide).contiguous().numpy().reshape(-1)
    return values


def _like(total: Tensor, values: _Floats) -> Tensor:
    """`values` with the shape, device and memory format of `total`."""
    result = torch.from_numpy(values.reshape(total.shape)).to(total.device)
    if total.is_contiguous():
        return result
    return torch.empty_like(total, dtype=result.dtype, requires_grad=False).copy_(result)


def _out_of_range(name: str, g: float) -> ValueError:
    """What to raise for a sum that is not finite or too large; it names no value of the sum."""
    return ValueError(
        f"{name}: the clipped sum is not finite or exceeds 2⁶²·grid = {_UNITS_LIMIT * g:.3g}. "
        "Drop examples with non-finite gradients, and clip, before adding noise."
    )
