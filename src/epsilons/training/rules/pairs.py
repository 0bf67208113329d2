"""Sums over pairs of places by compiled loops, in host memory: nothing is written but the sums.

Products are symmetric, so half of them will do; four rows and three columns at a time share what
they read.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import prange
from numpy.typing import NDArray
from torch import Tensor

from epsilons.training.compiled import reordered, share_out

MOST_NUMBERS = 4096  # in a row: their sums in single precision err by less than 1e-5

_ROWS, _COLUMNS = 4, 3  # as many sums as there are registers

_Floats = NDArray[Any]


def pair_sums(a: Tensor, g: Tensor, share: float) -> tuple[Tensor, Tensor, Tensor]:
    """Σ_tu ⟨a_t, a_u⟩⟨g_t, g_u⟩ and Σ_tu ⟨g_t, g_u⟩, and whether either one cancelled.

    Cancelled is what falls below a share of its part with t = u. a: (B, T, d), g: (B, T, p); what
    comes back is (B,).
    """
    n = a.shape[0]
    squares, totals = a.new_empty(n), a.new_empty(n)
    cancelled = torch.empty(n, dtype=torch.bool)
    ours, theirs = (t.detach().contiguous().numpy() for t in (a, g))
    results = squares.numpy(), totals.numpy(), cancelled.numpy()
    share_out(n, _some, _at_once, ours, theirs, share, *results)
    return squares, totals, cancelled


@reordered(parallel=True)
def _at_once(
    threads: int,
    a: _Floats,
    g: _Floats,
    share: float,
    squares: _Floats,
    totals: _Floats,
    cancelled: NDArray[np.bool_],
) -> None:
    n = len(a)
    for t in prange(threads):
        _some(t * n // threads, (t + 1) * n // threads, a, g, share, squares, totals, cancelled)


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
    ours = np.empty((_ROWS, _COLUMNS), a.dtype)
    theirs = np.empty((_ROWS, _COLUMNS), a.dtype)
    for i in range(first, last):
        square = term = total = length = 0.0
        for t in range(0, places, _ROWS):
            for u in range(t, places, _COLUMNS):
                _products(a[i], t, u, ours)
                _products(g[i], t, u, theirs)
                for row in range(min(_ROWS, places - t)):
                    for column in range(min(_COLUMNS, places - u)):
                        if u + column > t + row:
                            square += 2 * ours[row, column] * theirs[row, column]
                            total += 2 * theirs[row, column]
                        elif u + column == t + row:
                            term += ours[row, column] * theirs[row, column]
                            length += theirs[row, column]
        square += term
        total += length
        squares[i], totals[i] = square, total
        cancelled[i] = square < share * term or total < share * length


@reordered()
def _products(x: _Floats, t: int, u: int, found: _Floats) -> None:
    """Products of rows from t with rows from u; where there are none, the last one stands in."""
    end = len(x) - 1
    x0, x1, x2, x3 = x[t], x[min(t + 1, end)], x[min(t + 2, end)], x[min(t + 3, end)]
    y0, y1, y2 = x[u], x[min(u + 1, end)], x[min(u + 2, end)]
    a0 = b0 = c0 = a1 = b1 = c1 = a2 = b2 = c2 = a3 = b3 = c3 = x.dtype.type(0)
    for i in range(x.shape[1]):
        a0 += x0[i] * y0[i]
        b0 += x0[i] * y1[i]
        c0 += x0[i] * y2[i]
        a1 += x1[i] * y0[i]
        b1 += x1[i] * y1[i]
        c1 += x1[i] * y2[i]
        a2 += x2[i] * y0[i]
        b2 += x2[i] * y1[i]
        c2 += x2[i] * y2[i]
        a3 += x3[i] * y0[i]
        b3 += x3[i] * y1[i]
        c3 += x3[i] * y2[i]
    found[0, 0], found[0, 1], found[0, 2] = a0, b0, c0
    found[1, 0], found[1, 1], found[1, 2] = a1, b1, c1
    found[2, 0], found[2, 1], found[2, 2] = a2, b2, c2
    found[3, 0], found[3, 1], found[3, 2] = a3, b3, c3
