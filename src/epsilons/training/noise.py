"""Gaussian noise on the clipped sum, such that the last bits of the result tell nothing.

A floating-point sum plus floating-point noise betrays the sum: some results occur with one sum and
cannot occur with its neighbour (Mironov 2012). Here sum and noise are whole multiples of a grid g,
and are added as integers.
"""

from __future__ import annotations

import math
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray
from torch import Tensor

from epsilons.accounting import checks
from epsilons.training.gaussian import gaussian_units
from epsilons.training.keystream import Keystream

_GRID_BITS = 32
_UNITS_LIMIT = 2**62  # the noise stays below 2³⁷ units, so the total fits into int64
_CHUNK = 1 << 14  # coordinates at a time: their scratch stays in the cache
_SHARE = 1 << 20  # coordinates worth a thread: while torch's own wait for work, they take turns

_Floats = NDArray[np.floating[Any]]
_Chunk = tuple[_Floats, _Floats]  # sums, and where they go with noise


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
        noisy = {name: np.empty_like(values) for name, values in exact.items()}
        self._draw(_chunks(exact, noisy), std, g)
        return {name: _like(total, noisy[name]) for name, total in sums.items()}

    def _draw(self, chunks: list[_Chunk], std: float, g: float) -> None:
        """Noise for all chunks in their order, the same on any number of threads."""
        coordinates = sum(exact.size for exact, _ in chunks)
        threads = min(torch.get_num_threads(), coordinates // _SHARE)
        if threads <= 1:
            _add_noise(chunks, self.keystream, std, g)
            return
        *others, last = _shares(chunks, threads)
        streams = [self.keystream.detach(_bytes_for(share)) for share in others]
        with ThreadPoolExecutor(threads - 1) as pool:
            drawn = [
                pool.submit(_add_noise, share, stream, std, g)
                for share, stream in zip(others, streams, strict=True)
            ]
            _add_noise(last, self.keystream, std, g)
        for stream, share_drawn in zip(streams, drawn, strict=True):
            stream.destroy()
            share_drawn.result()


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


def _add_noise(chunks: list[_Chunk], stream: Keystream, std: float, g: float) -> None:
    scratch = np.empty(_CHUNK, dtype=np.uint64)
    for exact, noisy in chunks:
        words = stream.fill(scratch[: _words_for(exact.size)])
        units = gaussian_units(words, std / g, out=words.view(np.float64))
        _add_units(exact, units, g, noisy)


@njit(cache=True, nogil=True, error_model="numpy")
def _add_units(exact: _Floats, units: _Floats, g: float, noisy: _Floats) -> None:
    """g·(round(sum/g) + units), the integers added exactly and then rounded once to float64.

    Both integers are float64 without error, and IEEE 754 rounds their exact total.
    """
    per_unit = 1.0 / g
    for i in range(exact.size):
        noisy[i] = (np.rint(exact[i] * per_unit) + units[i]) * g


def _chunks(exact: dict[str, _Floats], noisy: dict[str, _Floats]) -> list[_Chunk]:
    return [
        (values[start : start + _CHUNK], noisy[name][start : start + _CHUNK])
        for name, values in exact.items()
        for start in range(0, values.size, _CHUNK)
    ]


def _shares(chunks: list[_Chunk], count: int) -> list[list[_Chunk]]:
    """The chunks in their order, cut into `count` runs of about as many coordinates."""
    sizes = np.array([exact.size for exact, _ in chunks], dtype=np.int64)
    starts = np.cumsum(sizes) - sizes
    cuts = np.searchsorted(starts, sizes.sum() * np.arange(1, count) / count).tolist()
    return [chunks[begin:end] for begin, end in pairwise([0, *cuts, len(chunks)])]


def _words_for(coordinates: int) -> int:
    """How many random words a chunk takes: a pair of them makes two values."""
    return coordinates + coordinates % 2


def _bytes_for(chunks: list[_Chunk]) -> int:
    return 8 * sum(_words_for(exact.size) for exact, _ in chunks)


def _flat(total: Tensor) -> _Floats:
    """The coordinates in logical order, in host memory, in at least single precision."""
    wide = torch.promote_types(total.dtype, torch.float32)
    values: _Floats = total.detach().to("cpu", wide).contiguous().numpy().reshape(-1)
    return values


def _like(total: Tensor, values: _Floats) -> Tensor:
    """`values` with the shape, device and memory format of `total`."""
    result = torch.from_numpy(values.reshape(total.shape)).to(total.device)
    if total.is_contiguous():
        return result
    return torch.empty_like(total, dtype=result.dtype, requires_grad=False).copy_(result)


def _check_range(name: str, values: _Floats, g: float) -> None:
    """A `ValueError` unless the sum is finite and fits the grid; it names no value of the sum."""
    if not _below(values, _UNITS_LIMIT * g):
        raise ValueError(
            f"{name}: the clipped sum is not finite or exceeds 2⁶²·grid = {_UNITS_LIMIT * g:.3g}. "
            "Drop examples with non-finite gradients, and clip, before adding noise."
        )


@njit(cache=True, nogil=True, error_model="numpy")
def _below(values: _Floats, limit: float) -> bool:
    """Whether all values are smaller than the limit, in size; NaN never is."""
    outside = 0
    for i in range(values.size):
        outside += 0 if abs(values[i]) < limit else 1
    return outside == 0
