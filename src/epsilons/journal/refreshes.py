"""Refreshes: norms of all examples, in blocks, as numbers of 64 or of 16 bits.

The entry "refresh" has the norms of the first `Opening.block` examples; entries "norms" right after
it have those of the others, a block each. All are written in one transaction, so that a refresh is
complete or not there.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from epsilons.accounting.histories import level_norms
from epsilons.accounting.plan import MOST_LEVELS_UINT16, Plan
from epsilons.journal.chain import Chain
from epsilons.journal.opening import Opening

_PER_OCTAVE = 1024  # numbers of 16 bits from one power of 2 above the bound to the next
_TYPES: dict[str, Literal["<f8", "<u2"]] = {"float64": "<f8", "uint16": "<u2"}


def append_refresh(
    chain: Chain, opening: Opening, facts: dict[str, float], norms: NDArray[np.float64]
) -> None:
    """Append the norms (n,) of all examples with the `facts` of their refresh."""
    blocks = _encoded_blocks(opening, norms)
    with chain.transaction():
        chain.insert("refresh", facts, b"", next(blocks))
        for block in blocks:
            chain.insert("norms", {}, b"", block)
    chain.publish()


def same_norms(chain: Chain, opening: Opening, number: int, norms: NDArray[np.float64]) -> bool:
    """Whether the refresh that begins at entry `number` has these norms (n,)."""
    blocks = enumerate(_encoded_blocks(opening, norms), start=number)
    return all(chain.norms(entry) == block for entry, block in blocks)


def refresh_norms(
    chain: Chain, opening: Opening, number: int, first: int = 0, size: int | None = None
) -> NDArray[np.float64]:
    """Norms (size,) of the examples from `first` on, by default of all, in the refresh `number`.

    `number`: of its entry "refresh". ValueError if a block of it is missing.
    """
    plan, block = opening.plan, opening.block
    last = plan.n if size is None else first + size
    item = np.dtype(_TYPES[plan.norm_storage])
    found = np.empty(last - first, dtype=item)
    for start in range(first - first % block, last, block):
        low, high = max(start, first), min(start + block, last)
        part = chain.part_of_norms(
            number + start // block, (low - start) * item.itemsize, (high - low) * item.itemsize
        )
        if len(part) != (high - low) * item.itemsize:
            raise ValueError(f"{chain.path} lacks norms of the refresh at entry {number}")
        found[low - first : high - first] = np.frombuffer(part, dtype=item)
    return found if plan.norm_storage == "float64" else _grid(*_of_grid(plan))[found]


def stored_norms(plan: Plan, norms: NDArray[np.float64]) -> NDArray[np.float64]:
    """The `norms` as a journal of `plan` keeps and charges them: none is lower."""
    if plan.norm_storage == "float64":
        return norms
    return _grid(*_of_grid(plan))[_encoded(plan, norms)]


def _encoded_blocks(opening: Opening, norms: NDArray[np.float64]) -> Iterator[bytes]:
    for first in range(0, len(norms), opening.block):
        yield _encoded(opening.plan, norms[first : first + opening.block]).tobytes()


def _encoded(plan: Plan, norms: NDArray[np.float64]) -> NDArray[np.float64] | NDArray[np.uint16]:
    """The norms as they are stored; of 16 bits: the place of the least number not below each."""
    if plan.norm_storage == "float64":
        return norms
    return np.searchsorted(_grid(*_of_grid(plan)), norms).astype("<u2")


def _of_grid(plan: Plan) -> tuple[float, int]:
    return max(phase.max_grad_norm for phase in plan.all_phases), plan.levels


@lru_cache(maxsize=4)
def _grid(bound: float, levels: int) -> NDArray[np.float64]:
    """The 2¹⁶ norms that 16 bits stand for, ascending: up to the clip bound, above it, ∞, NaN.

    Up to the bound they are evenly spaced, and the levels of the accountant are among them: rounded
    up to a level, a norm goes to the same level whether or not it was rounded up to one of these
    before. So thresholds of individual clipping don't change.
    """
    between = MOST_LEVELS_UINT16 // levels
    small = level_norms(bound, levels * between)
    small[::between] = level_norms(bound, levels)
    with np.errstate(over="ignore"):
        large = bound * 2 ** (np.arange(1, 2**16 - 1 - small.size) / _PER_OCTAVE)
    return np.concatenate([small, large, [np.inf, np.nan]])
