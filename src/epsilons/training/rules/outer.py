"""Sums of outer products by a compiled loop, in host memory: what every example's weight receives.

A tile of the result is summed in registers, squared there and written once.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from epsilons.training.compiled import reordered, scratch
from epsilons.training.rules.tiles import COLUMNS, LANES, ROWS, copy, tile
from epsilons.training.threads import go_through, share_out

MOST_PLACES = 128  # one chain of sums in single precision errs by less than 1e-5
_GROUP = math.lcm(ROWS, LANES)  # rows of tiles that share what they read of a panel

_Floats = NDArray[Any]


def outer_sums(a: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Σ_t g_t a_tᵀ (B, p, d), their squared norms (B,) and Σ_t g_t (B, p).

    a: (B, T, d) and g: (B, T, p) in single precision, T ≥ 1.
    """
    (n, _, d), p = a.shape, g.shape[2]
    formed, squares, totals = a.new_empty(n, p, d), a.new_empty(n), a.new_empty(n, p)
    share_out(n, _some, _at_once, a, g, formed, squares, totals)
    return formed, squares, totals


@reordered()
def _at_once(threads: int, count: int, *operands: Any) -> Any:
    return go_through(_some, threads, count, operands)


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
    left = scratch(places * _GROUP, np.float32)
    right = scratch(panels * places * COLUMNS, np.float32)
    edge, lanes = scratch(ROWS * COLUMNS, np.float32), scratch(LANES, np.float32)
    flat = formed.reshape(-1)
    for i in range(first, last):
        _add_up(g[i], totals[i])
        for panel in range(panels):
            _pack(a[i], panel * COLUMNS, COLUMNS, right[panel * places * COLUMNS :])
        square = 0.0
        for first_row in range(0, height, _GROUP):
            _pack(g[i], first_row, _GROUP, left)
            for panel in range(panels):
                column, begin = panel * COLUMNS, panel * places * COLUMNS
                lanes[:] = 0
                for row in range(first_row, min(first_row + _GROUP, height), ROWS):
                    at = row - first_row
                    if row + ROWS <= height and column + COLUMNS <= width:
                        to = (i * height + row) * width + column
                        tile(left, at, _GROUP, right, begin, places, flat, to, width, lanes)
                        continue
                    tile(left, at, _GROUP, right, begin, places, edge, 0, COLUMNS, lanes)
                    for r in range(min(ROWS, height - row)):
                        for c in range(min(COLUMNS, width - column)):
                            formed[i, row + r, column + c] = edge[r * COLUMNS + c]
                for lane in range(LANES):
                    square += lanes[lane]
        squares[i] = square


@reordered()
def _add_up(rows: _Floats, total: _Floats) -> None:
    total[:] = 0
    for t in range(rows.shape[0]):
        for j in range(rows.shape[1]):
            total[j] += rows[t, j]


@reordered()
def _pack(x: _Floats, first: int, count: int, packed: _Floats) -> None:
    """Some columns, whole vectors, of every place side by side; zeros where there are none."""
    places, width = x.shape
    flat = x.reshape(-1)
    for t in range(places):
        if first + count <= width:
            for lane in range(0, count, LANES):
                copy(flat, t * width + first + lane, packed, t * count + lane)
        else:
            for c in range(count):
                seen = first + c < width
                packed[t * count + c] = x[t, first + c] if seen else x.dtype.type(0)
