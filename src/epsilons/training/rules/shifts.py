"""Squared norms of filter gradients from products of pixels, by compiled loops in host memory.

Patches overlap, so that products of patches share products of pixels:

    norm² = Σ_tu ⟨g_t, g_u⟩ Σ_shift ⟨a_{t+shift}, a_{u+shift}⟩

over pairs of places t, u. Nothing is written but the two matrices of products.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from epsilons.training.compiled import reordered
from epsilons.training.rules.contractions import Geometry, gram
from epsilons.training.threads import go_through, share_out

_Floats = NDArray[Any]
_Flags = NDArray[np.bool_]
_Whole = NDArray[np.int64]


def shifted_squares(
    source: Tensor, places: Tensor, geometry: Geometry, share: float
) -> tuple[Tensor, Tensor]:
    """Squared norms, and whether they cancelled: fall below a share of their part with t = u.

    For images (N, c, …) and what came back to their places (N, o, …), with stride 1 and one group
    of channels; what comes back is (N,).
    """
    n = source.shape[0]
    squares, cancelled = source.new_empty(n), torch.empty(n, dtype=torch.bool)
    pixels, their = (gram(t.detach().flatten(2).mT) for t in (source, places))
    kernel, _, before, dilation, _ = geometry
    walk = np.array([source.shape[2:], places.shape[2:], kernel, before, dilation])
    share_out(n, _some, _at_once, pixels, their, walk, share, squares, cancelled.numpy())
    return squares, cancelled


@reordered()
def _at_once(threads: int, count: int, *operands: Any) -> Any:
    return go_through(_some, threads, count, operands)


@reordered()
def _some(
    first: int,
    last: int,
    pixels: _Floats,
    places: _Floats,
    walk: _Whole,
    share: float,
    squares: _Floats,
    cancelled: _Flags,
) -> None:
    """A pair of places in different rows counts twice."""
    (height, width), (rows, columns) = (walk[0, 0], walk[0, 1]), (walk[1, 0], walk[1, 1])
    (down, across), (above, left) = (walk[2, 0], walk[2, 1]), (walk[3, 0], walk[3, 1])
    step_down, step_across = walk[4, 0], walk[4, 1]
    met = np.zeros((across, rows * width), places.dtype)  # a place's products where pixels lie
    for i in range(first, last):
        square = term = 0.0
        for row in range(rows):
            for column in range(columns):
                t = row * columns + column
                for tap in range(across):
                    right = tap * step_across - left
                    if not 0 <= column + right < width:
                        continue
                    _lay_out(places[i, t], row, rows, columns, right, width, met[tap])
                    for above_tap in range(down):
                        lower = above_tap * step_down - above
                        if not 0 <= row + lower < height:
                            continue
                        pixel = (row + lower) * width + column + right
                        term += places[i, t, t] * pixels[i, pixel, pixel]
                        end = min(rows, height - lower)
                        square += _dot(
                            pixels[i, pixel, (row + lower) * width :],
                            met[tap, row * width : end * width],
                        )
        squares[i] = square
        cancelled[i] = square < share * term


@reordered()
def _lay_out(
    products: _Floats, row: int, rows: int, columns: int, right: int, width: int, met: _Floats
) -> None:
    """Products with the places from `row` on, each where the pixel `right` of it lies."""
    begin = max(0, -right)
    length = min(columns, width - right) - begin
    for other in range(row, rows):
        times = products.dtype.type(1 if other == row else 2)
        target, given = met[other * width + begin + right :], products[other * columns + begin :]
        for j in range(length):
            target[j] = times * given[j]


@reordered()
def _dot(x: _Floats, y: _Floats) -> Any:
    total = y.dtype.type(0)
    for j in range(len(y)):
        total += x[j] * y[j]
    return total
