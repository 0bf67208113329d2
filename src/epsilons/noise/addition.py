"""Sums and noise added as integers, chunk by chunk, on all cores."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray
from torch import Tensor

from epsilons.accounting import threads
from epsilons.noise.gaussian import gaussian_units
from epsilons.noise.keystream import Keystream

UNITS_LIMIT = 2.0**62  # the noise stays below 2³⁷ units, so the total fits into int64
_CHUNK = 1 << 14  # coordinates whose noise is made together: they stay in the cache
_WORD = 8  # bytes

_Floats = NDArray[np.floating[Any]]


class _Chunk(NamedTuple):
    """Some coordinates of one tensor, and where their random words lie."""

    tensor: int
    start: int
    size: int
    words: int  # before them, counted from where the draw begins


def add_noise(
    keystream: Keystream, std: float, g: float, unit: float, sums: Sequence[Tensor]
) -> int | None:
    """sums ← unit·(round(sums/g) + round(noise/g)), the same on any number of threads.

    Contiguous tensors on the CPU, float32 or float64. If a sum does not fit the grid, the index of
    its tensor comes back, and none of them means anything.
    """
    flat = [total.numpy().reshape(-1) for total in sums]
    chunks, count = _chunks(tuple(values.size for values in flat))
    begin = keystream.skip(_WORD * count)
    outside: list[int] = []

    def part(k: int, parts: int) -> None:
        room = np.empty(_CHUNK, np.uint64)
        for chunk in chunks[k * len(chunks) // parts : (k + 1) * len(chunks) // parts]:
            words = room[: chunk.size + chunk.size % 2]
            keystream.fill_at(begin + _WORD * chunk.words, words)
            gaussian_units(words, std / g)
            values = flat[chunk.tensor][chunk.start : chunk.start + chunk.size]
            if _add_units(values, words.view(np.float64), g, unit):
                outside.append(chunk.tensor)

    threads.run(part, worthwhile=len(chunks) > 1)
    return min(outside, default=None)


@functools.lru_cache(64)
def _chunks(sizes: tuple[int, ...]) -> tuple[list[_Chunk], int]:
    """How the coordinates of tensors are cut, and how many words they take: an even number each."""
    chunks, words = [], 0
    for tensor, size in enumerate(sizes):
        for start in range(0, size, _CHUNK):
            length = min(_CHUNK, size - start)
            chunks.append(_Chunk(tensor, start, length, words))
            words += length + length % 2  # a pair of words makes two values
    return chunks, words


@njit(cache=True, nogil=True, error_model="numpy")
def _add_units(sums: _Floats, units: _Floats, g: float, unit: float) -> bool:
    """sums ← unit·(round(sums/g) + units), integers added exactly and then rounded once to float64.

    Both integers are float64 without error, and IEEE 754 rounds their exact total. Returns whether
    a sum is not below the limit, in size; NaN never is.
    """
    per_unit = 1.0 / g
    outside = 0
    for i in range(sums.size):
        whole = np.rint(sums[i] * per_unit)
        sums[i] = (whole + units[i]) * unit
        outside += 0 if abs(whole) < UNITS_LIMIT else 1
    return outside > 0
