"""Gaussian noise on the clipped sum, such that the last bits of the result tell nothing.

A floating-point sum plus floating-point noise betrays the sum: some results occur with one sum and
cannot occur with its neighbour (Mironov 2012). Here sum and noise are whole multiples of a grid g,
and are added as integers.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray
from torch import Tensor

from epsilons.accounting import threads
from epsilons.accounting.sums import grid
from epsilons.noise.gaussian import gaussian_units
from epsilons.noise.keystream import Keystream

UNITS_LIMIT = 2.0**62  # the noise stays below 2³⁷ units, so the total fits into int64
_CHUNK = 1 << 14  # coordinates whose noise is made together: they stay in the cache
_WORD = 8  # bytes
_PRECISE = frozenset({torch.float32, torch.float64})
_Floats = NDArray[np.floating[Any]]


class Noise(Protocol):
    """What adds noise to a clipped sum and divides it: the `noise` of `private_step`."""

    def added_to(self, sums: dict[str, Tensor], std: float, divisor: float) -> dict[str, Tensor]:
        """Every sum, by its parameter's name, plus independent N(0, `std`²), over `divisor`.

        The result is the caller's own. The `sums` are given away: the result may be written over
        them.
        """
        ...


class GridNoise:
    """Noise from a keystream, on the grid of its standard deviation."""

    def __init__(self, keystream: Keystream) -> None:
        self.keystream = keystream

    def added_to(
        self, sums: dict[str, Tensor], std: float, divisor: float = 1.0
    ) -> dict[str, Tensor]:
        """Every sum plus independent N(0, std²) in each coordinate, both on the grid.

            result = g·(round(sum/g) + round(noise/g)) / divisor        added as integers

        round(noise/g) + k = round((noise + g·k)/g) for every integer k: the result is a function
        of (rounded sum) + N(0, std²), hence as private as the Gaussian mechanism whose sensitivity
        is `rounding_charge` above the unrounded one.

        The sums are used up, by an error too: where it can be, the result takes their place in
        memory.

        Noise is drawn in the order of `sums` and of each tensor's logical layout. Results have the
        dtype and device of their sums, half precision becoming float32. With `std` 0 the sums come
        back in their own dtype, divided, without noise or privacy. `std`: standard deviation of the
        noise, in units of the sums. `divisor`: what the noisy sums are divided by, > 0, by default
        1. ValueError for a sum that is not finite or too large for the grid; its noise is then
        drawn again.
        """
        if not 0 < divisor < math.inf:
            raise ValueError(f"divisor={divisor} must be a finite number > 0.")
        if std == 0:
            return {name: total / divisor for name, total in sums.items()}
        g = grid(std)
        noisy = _in_order(sums.values())
        begin = self.keystream.position
        outside = _add_noise(self.keystream, std, g, g / divisor, noisy)
        if outside is not None:
            for values in noisy:
                values.fill_(math.nan)  # so that the noise, which will be drawn again, is not kept
            self.keystream.seek(begin)
            raise _out_of_range(list(sums)[outside], g)
        pairs = zip(sums.items(), noisy, strict=True)
        return {name: _like(total, values) for (name, total), values in pairs}

    def add_units(
        self, units: NDArray[np.int64], sizes: tuple[int, ...], std: float, part: int, parts: int
    ) -> None:
        """Add `part`, from 0, of `parts` of round(noise/g) to multiples of the grid, in place.

        `units`: whole numbers for tensors of `sizes`, one after another. `std`: standard deviation
        of the noise. The parts together are the noise that `added_to` draws, and each of them takes
        as much of the stream as the whole.
        """
        chunks, count = _chunks(sizes)
        begin = self.keystream.skip(_WORD * count)
        begins = np.cumsum([0, *sizes])
        mine = chunks[part * len(chunks) // parts : (part + 1) * len(chunks) // parts]

        def some(k: int, n: int) -> None:
            room = np.empty(_CHUNK, np.uint64)
            for chunk in mine[k * len(mine) // n : (k + 1) * len(mine) // n]:
                words = room[: chunk.size + chunk.size % 2]
                self.keystream.fill_at(begin + _WORD * chunk.words, words)
                gaussian_units(words, std / grid(std))
                start = begins[chunk.tensor] + chunk.start
                units[start : start + chunk.size] += words.view(np.float64)[: chunk.size].astype(
                    np.int64
                )

        threads.run(some, worthwhile=len(mine) > 1)


class SecureNoise(GridNoise):
    """Noise that nobody can take away: the key comes from the operating system.

    `keystream`: a secret one to draw from, by default a fresh one.
    """

    def __init__(self, keystream: Keystream | None = None) -> None:
        if keystream is not None and keystream.is_seeded:
            raise ValueError("the keystream is seeded, hence not secret; use SeededNoise(seed)")
        super().__init__(Keystream.secret(b"noise") if keystream is None else keystream)


class SeededNoise(GridNoise):
    """The same noise for the same seed, on every machine.

    For experiments. Whoever knows the seed can take the noise away. It differs from `SecureNoise`
    in the key alone. `seed`: an int.
    """

    def __init__(self, seed: int) -> None:
        super().__init__(Keystream.seeded(seed, b"noise"))


def add_rounded(
    units: NDArray[np.int64], sums: dict[str, Tensor], std: float, summands: int = 1
) -> None:
    """units += round(sums/g), for the tensors of `sums` one after the other, on the grid of `std`.

    ValueError for a sum that is not finite or too large for `summands` of them to be added.
    """
    g, begin = grid(std), 0
    for name, total in sums.items():
        values = total.detach().to("cpu").contiguous().resolve_neg()
        if values.dtype not in _PRECISE:
            values = values.float()
        flat = values.numpy().reshape(-1)
        if _round_to_units(flat, units[begin : begin + flat.size], g, UNITS_LIMIT / summands):
            raise _out_of_range(name, g)
        begin += flat.size


def from_units(units: NDArray[np.int64], std: float, divisor: float) -> NDArray[np.float64]:
    """What whole multiples of the grid of `std` are, over `divisor`; rounded as `added_to` does."""
    return units.astype(np.float64) * (grid(std) / divisor)


def _in_order(sums: Iterable[Tensor]) -> list[Tensor]:
    """The sums as contiguous CPU tensors, in float32 or better, that share no memory.

    A sum that is one already is returned itself, others are copied.
    """
    result: list[Tensor] = []
    taken = set[int]()
    for total in sums:
        own = type(total) is Tensor and _plain(total) and total.data_ptr() not in taken
        values = total if own else _copied(total)
        taken.add(values.data_ptr())
        result.append(values)
    return result


def _plain(total: Tensor) -> bool:
    """Whether a tensor is a contiguous CPU tensor that owns its memory, without pending signs."""
    dense = total.is_cpu and total.layout is torch.strided and total.dtype in _PRECISE
    seen = dense and total.is_contiguous() and not total.is_neg() and not total._is_zerotensor()
    if not seen or total.requires_grad:
        return False
    memory = total.untyped_storage()
    return memory.nbytes() == total.nbytes and memory.resizable()  # and not numpy's, say


def _copied(total: Tensor) -> Tensor:
    if total.is_complex():
        raise ValueError("a sum is complex; expected real ones: torch.view_as_real(…)")
    wide = torch.promote_types(total.dtype, torch.float32)
    values = total.detach().to("cpu", wide, copy=True).contiguous().resolve_neg()
    if type(values) is not Tensor:  # whose memory is elsewhere
        raise TypeError(f"a sum is a {type(values).__name__}; expected a plain tensor")
    return values


def _like(total: Tensor, values: Tensor) -> Tensor:
    """`values` with the device and memory format of `total`."""
    result = values.to(total.device)
    if total.is_contiguous():
        return result
    return torch.empty_like(total, dtype=result.dtype, requires_grad=False).copy_(result)


def _out_of_range(name: str, g: float) -> ValueError:
    """What to raise for a sum that is not finite or too large; it names no value of the sum."""
    return ValueError(
        f"{name}: the clipped sum is not finite or exceeds 2⁶²·grid = {UNITS_LIMIT * g:.3g}. "
        "Drop examples with non-finite gradients, and clip, before adding noise."
    )


class _Chunk(NamedTuple):
    """Some coordinates of one tensor, and the position of their random words."""

    tensor: int
    start: int
    size: int
    words: int  # before them, counted from where the draw begins


def _add_noise(
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


@njit(cache=True, nogil=True, error_model="numpy")
def _round_to_units(sums: _Floats, units: NDArray[np.int64], g: float, limit: float) -> bool:
    """units += round(sums/g). Returns whether a sum is not below the limit; NaN never is."""
    per_unit = 1.0 / g
    outside = 0
    for i in range(sums.size):
        whole = np.rint(sums[i] * per_unit)
        fits = abs(whole) < limit
        outside += 0 if fits else 1
        units[i] += np.int64(whole) if fits else 0
    return outside > 0
