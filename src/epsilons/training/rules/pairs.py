"""Sums over pairs of places by compiled loops, in host memory: nothing is written but the sums.

Products are symmetric, so half of them will do; a tile of rows and columns shares what it reads.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from epsilons.training.compiled import reordered
from epsilons.training.rules.tiles import LANES, PAIRS, products
from epsilons.training.threads import go_through, share_out

MOST_NUMBERS = 4096  # in a row: their sums in single precision err by less than 1e-5

_ROWS, _COLUMNS = PAIRS

_Floats = NDArray[Any]


def pair_sums(a: Tensor, g: Tensor, share: float) -> tuple[Tensor, Tensor, Tensor]:
    """Σ_tu ⟨a_t, a_u⟩⟨g_t, g_u⟩ and Σ_tu ⟨g_t, g_u⟩, and whether either one cancelled.

    Cancelled is what falls below a share of its part with t = u. a: (B, T, d), g: (B, T, p); what
    comes back is (B,).
    """
    n = a.shape[0]
    squares, totals = a.new_empty(n), a.new_empty(n)
    cancelled = torch.empty(n, dtype=torch.bool)
    share_out(n, _some, _at_once, a, g, share, squares, totals, cancelled.numpy())
    return squares, totals, cancelled


@reordered()
def _at_once(threads: int, count: int, *operands: Any) -> Any:
    return go_through(_some, threads, count, operands)


@reordered()
def _some(
    first: int,
    last: int,
    a: _Floats,
    g: _Floats,
    share: float,
    squares: _Floats,
    totals: _Floats,
    cancelled: NDArray[np.bool_],
) -> None:
    places = a.shape[1]
    ours_padded, theirs_padded = _room(a), _room(g)
    ours, theirs = np.empty(LANES, a.dtype), np.empty(LANES, a.dtype)
    for i in range(first, last):
        x, width = _filled(a[i], ours_padded)
        y, height = _filled(g[i], theirs_padded)
        square = term = total = length = 0.0
        for t in range(0, places, _ROWS):
            for u in range(t, places, _COLUMNS):
                products(x, t * width, u * width, width, width, ours)
                products(y, t * height, u * height, height, height, theirs)
                if u >= t + _ROWS:
                    for lane in range(LANES):
                        square += 2.0 * ours[lane] * theirs[lane]  # in double precision
                        total += 2 * theirs[lane]
                    continue
                for lane in range(LANES):
                    ahead = u + lane % _COLUMNS - (t + lane // _COLUMNS)
                    if ahead > 0:
                        square += 2.0 * ours[lane] * theirs[lane]  # in double precision
                        total += 2 * theirs[lane]
                    elif ahead == 0:
                        term += ours[lane] * theirs[lane]
                        length += theirs[lane]
        square += term
        total += length
        squares[i], totals[i] = square, total
        cancelled[i] = square < share * term or total < share * length


@reordered()
def _room(rows: _Floats) -> _Floats:
    """Zeros for the rows of one example, filled up to whole tiles; none if they are such."""
    places, width = rows.shape[1:]
    full = max(LANES, width + -width % LANES)
    if places % _ROWS == 0 and width == full:
        return np.zeros((0, 0), rows.dtype)
    return np.zeros((places + -places % _ROWS, full), rows.dtype)


@reordered()
def _filled(rows: _Floats, room: _Floats) -> tuple[_Floats, int]:
    """The rows of one example one after the other, in whole tiles; how long each is."""
    if room.size == 0:
        return rows.reshape(-1), rows.shape[1]
    room[: rows.shape[0], : rows.shape[1]] = rows
    return room.reshape(-1), room.shape[1]
