"""Sums and noise added as integers, by a compiled loop that takes many tensors at a time."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray
from torch import Tensor

from epsilons.training.cipher import cipher_words
from epsilons.training.compiled import doubles_at, scratch, singles_at
from epsilons.training.gaussian import gaussian_units
from epsilons.training.keystream import Keystream
from epsilons.training.threads import go_through, share_out

UNITS_LIMIT = 2.0**62  # the noise stays below 2³⁷ units, so the total fits into int64
_CHUNK = 1 << 14  # coordinates that one thread takes at a time: they stay in its cache
_BLOCK = 16 * _CHUNK  # random words that are drawn together

_Words = NDArray[np.uint64]
_NOTHING = np.empty(0, np.uint64), np.uint64(0), np.uint64(0)
_Floats = NDArray[np.floating[Any]]
_Counts = NDArray[np.int64]


def add_noise(
    keystream: Keystream, std: float, g: float, unit: float, sums: Sequence[Tensor]
) -> int | None:
    """sums ← unit·(round(sums/g) + round(noise/g)), the same on any number of threads.

    Contiguous tensors in host memory, of single or double precision. The place of a tensor with a
    sum that doesn't fit the grid comes back: then none of them means anything.
    """
    tensors = np.array([(s.data_ptr(), s.element_size()) for s in sums], np.int64)
    sizes = tuple(s.numel() for s in sums)
    given = keystream.hand_over(sum(map(_words_for, sizes)))
    keys, nonce, first = _NOTHING if given is None else given
    blocks = _blocks(sizes, _BLOCK if given is None else sys.maxsize)
    drawn = np.empty(0 if given else max((total for total, _, _ in blocks), default=0), np.uint64)
    for total, owners, chunks in blocks:
        words = drawn if given else keystream.fill(drawn[:total])
        outside = np.zeros(len(chunks), np.int64)
        operands = words, keys, nonce, first, std / g, g, unit
        stretches = -(-total // _CHUNK)
        share_out(stretches, _some, _at_once, *operands, tensors[owners], chunks, outside)
        if outside.any():
            return int(owners[np.flatnonzero(outside)[0]])
    return None


@functools.lru_cache(64)
def _blocks(sizes: tuple[int, ...], most: int) -> list[tuple[int, _Counts, _Counts]]:
    """How the coordinates of tensors are cut into chunks, and these gathered into blocks.

    For each block the number of its random words, at `most` so many; of each chunk, the place of
    the tensor that it is of; and where it begins there, how long it is and where its words begin.
    """
    blocks = []
    for block in _gathered(sizes, most):
        table = np.array(block, np.int64)
        last = table[-1]
        blocks.append((int(last[3] + _words_for(last[2])), table[:, 0].copy(), table[:, 1:].copy()))
    return blocks


def _gathered(sizes: Sequence[int], most: int) -> Iterator[list[tuple[int, int, int, int]]]:
    block: list[tuple[int, int, int, int]] = []
    at = 0
    for place, size in enumerate(sizes):
        for start in range(0, size, _CHUNK):
            length = min(_CHUNK, size - start)
            if block and at + length > most:
                yield block
                block, at = [], 0
            block.append((place, start, length, at))
            at += _words_for(length)
    if block:
        yield block


def _words_for(coordinates: int) -> int:
    """How many random words coordinates take: a pair of them makes two values."""
    return coordinates + coordinates % 2


@njit(cache=True, nogil=True, error_model="numpy")
def _at_once(threads: int, count: int, *operands: Any) -> Any:
    return go_through(_some, threads, count, operands)


@njit(cache=True, nogil=True, error_model="numpy")
def _some(
    first: int,
    last: int,
    words: _Words,
    keys: _Words,
    nonce: np.uint64,
    block: np.uint64,
    scale: float,
    g: float,
    unit: float,
    sources: _Counts,
    chunks: _Counts,
    outside: _Counts,
) -> None:
    """The chunks whose words begin in some stretches; how many sums of each don't fit is noted.

    With keys, words are made here, those of the first chunk from `block` on; else they are there.
    """
    room = scratch(_CHUNK if keys.size else 0, np.uint64)
    for chunk in range(len(chunks)):
        start, size, at = chunks[chunk]
        if not first <= at // _CHUNK < last:
            continue
        its = room[: size + size % 2] if keys.size else words[at : at + size + size % 2]
        if keys.size:
            cipher_words(keys, nonce, block + np.uint64(at // 2), its)
        gaussian_units(its, scale)
        units = its.view(np.float64)
        begin, width = sources[chunk]
        place = begin + start * width
        if width == 4:
            outside[chunk] = _add_units(singles_at(place, size), units, g, unit)
        else:
            outside[chunk] = _add_units(doubles_at(place, size), units, g, unit)


@njit(cache=True, nogil=True, error_model="numpy")
def _add_units(sums: _Floats, units: _Floats, g: float, unit: float) -> int:
    """sums ← unit·(round(sums/g) + units), integers added exactly and then rounded once to float64.

    Both integers are float64 without error, and IEEE 754 rounds their exact total. Returns how
    many sums are not below the limit, in size; NaN never is.
    """
    per_unit = 1.0 / g
    outside = 0
    for i in range(sums.size):
        whole = np.rint(sums[i] * per_unit)
        sums[i] = (whole + units[i]) * unit
        outside += 0 if abs(whole) < UNITS_LIMIT else 1
    return outside
