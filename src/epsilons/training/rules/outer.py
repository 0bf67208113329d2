"""Sums of outer products by a compiled loop, in host memory: what every example's weight receives.

A tile of the result is summed in registers, squared there and written once.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import prange
from numpy.typing import NDArray
from torch import Tensor

from epsilons.training.compiled import reordered, share_out
from epsilons.training.rules.tiles import COLUMNS, LANES, ROWS, VECTORS, copy, tile

MOST_PLACES = 128  # one chain of sums in single precision errs by less than 1e-5

_Floats = NDArray[Any]


def outer_sums(a: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Σ_t g_t a_tᵀ (B, p, d), their squared norms (B,) and Σ_t g_t (B, p).

    a: (B, T, d) and g: (B, T, p) in single precision, T ≥ 1.
    """
    (n, _, d), p = a.shape, g.shape[2]
    formed, squares, totals = a.new_empty(n, p, d), a.new_empty(n), a.new_empty(n, p)
    ours, theirs = (t.detach().contiguous().numpy() for t in (a, g))
    results = formed.numpy(), squares.numpy(), totals.numpy()
    share_out(n, _some, _at_once, ours, theirs, *results)
    return formed, squares, totals


@reordered(parallel=True)
def _at_once(
    threads: int, a: _Floats, g: _Floats, formed: _Floats, squares: _Floats, totals: _Floats
) -> None:
    n = len(a)
    for t in prange(threads):
        _some(t * n // threads, (t + 1) * n // threads, a, g, formed, squares, totals)


@reordered()
def _some(
    first: int,
    last: int,
    a: _Floats,
    g: _Floats,
    formed: _Floats,
    squares: _Floats,
    totals: _Floats,
) -> None:
    places, width, height = a.shape[1], a.shape[2], g.shape[2]
    panels = -(-width // COLUMNS)
    left = np.zeros(places * ROWS + LANES, a.dtype)
    right = np.zeros(panels * places * COLUMNS, a.dtype)
    edge = np.empty(ROWS * COLUMNS, a.dtype)
    flat = formed.reshape(-1)
    for i in range(first, last):
        _add_up(g[i], totals[i])
        for panel in range(panels):
            _pack_columns(a[i], panel * COLUMNS, right[panel * places * COLUMNS :])
        square = 0.0
        for row in range(0, height, ROWS):
            _pack_rows(g[i], row, left)
            for panel in range(panels):
                column, begin = panel * COLUMNS, panel * places * COLUMNS
                if row + ROWS <= height and column + COLUMNS <= width:
                    at = (i * height + row) * width + column
                    square += tile(left, 0, 1, ROWS, right, begin, COLUMNS, places, flat, at, width)
                    continue
                square += tile(left, 0, 1, ROWS, right, begin, COLUMNS, places, edge, 0, COLUMNS)
                for r in range(min(ROWS, height - row)):
                    for c in range(min(COLUMNS, width - column)):
                        formed[i, row + r, column + c] = edge[r * COLUMNS + c]
        squares[i] = square


@reordered()
def _add_up(rows: _Floats, total: _Floats) -> None:
    total[:] = 0
    for t in range(rows.shape[0]):
        for j in range(rows.shape[1]):
            total[j] += rows[t, j]


@reordered()
def _pack_columns(x: _Floats, first: int, packed: _Floats) -> None:
    """Some columns of every place side by side; what isn't there has stayed zero."""
    places, width = x.shape
    flat = x.reshape(-1)
    for t in range(places):
        if first + COLUMNS <= width:
            for v in range(VECTORS):
                copy(flat, t * width + first + v * LANES, packed, t * COLUMNS + v * LANES)
        else:
            for c in range(width - first):
                packed[t * COLUMNS + c] = x[t, first + c]


@reordered()
def _pack_rows(x: _Floats, first: int, packed: _Floats) -> None:
    """The same for fewer columns than a vector has: the next place overwrites what is too much."""
    places, width = x.shape
    flat = x.reshape(-1)
    for t in range(places):
        if first + LANES <= width:
            copy(flat, t * width + first, packed, t * ROWS)
        else:
            for r in range(ROWS):
                packed[t * ROWS + r] = x[t, first + r] if first + r < width else x.dtype.type(0)
