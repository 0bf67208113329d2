"""Sums over places with the same id by a compiled loop, in host memory."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from epsilons.training.compiled import reordered
from epsilons.training.rules.squares import square
from epsilons.training.threads import go_through, share_out

_Floats = NDArray[Any]
_Ids = NDArray[np.integer[Any]]


def looked_up_squares(ids: Tensor, g: Tensor) -> Tensor:
    """Σ_v ‖Σ_t g_t [id_t = v]‖², (B,); ids (B, T), g (B, T, d) in single precision."""
    squares = g.new_empty(len(g))
    share_out(len(g), _some, _at_once, ids.contiguous().numpy(), g, squares)
    return squares


@reordered()
def _at_once(threads: int, count: int, *operands: Any) -> Any:
    return go_through(_some, threads, count, operands)


@reordered()
def _some(first: int, last: int, ids: _Ids, g: _Floats, squares: _Floats) -> None:
    places, width = g.shape[1:]
    row = np.empty(width)  # double precision: an id may occur any number of times
    for i in range(first, last):
        order = np.argsort(ids[i])
        total = 0.0
        row[:] = 0
        for t in range(places):
            here = order[t]
            if t > 0 and ids[i, here] != ids[i, order[t - 1]]:
                total += square(row)
                row[:] = 0
            for j in range(width):
                row[j] += g[i, here, j]
        squares[i] = total + square(row)
