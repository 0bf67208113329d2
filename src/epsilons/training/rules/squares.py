"""Squares summed along long rows by compiled loops, in host memory."""

from __future__ import annotations

from typing import Any

import torch
from numba import prange
from numpy.typing import NDArray
from torch import Tensor

from epsilons.training.compiled import compiled_threads, reordered

PIECE = 4096  # numbers whose squares are summed in single precision
_ALONE = 1 << 15  # numbers that are not worth a second thread

_Floats = NDArray[Any]


def row_squares(rows: Tensor) -> Tensor:
    """Σ_j rows_ij², (N,), for rows (N, d) in single precision.

    Pieces are added in double precision: one long sum would come out too small.
    """
    n = rows.shape[0]
    squares = rows.new_empty(n)
    values, results = rows.detach().contiguous().numpy(), squares.numpy()
    threads = min(torch.get_num_threads(), n) if rows.numel() > _ALONE else 1
    if threads <= 1:
        _some(0, n, values, results)
    else:
        with compiled_threads(threads):
            _at_once(threads, values, results)
    return squares


@reordered(parallel=True)
def _at_once(threads: int, rows: _Floats, squares: _Floats) -> None:
    n = len(rows)
    for t in prange(threads):
        _some(t * n // threads, (t + 1) * n // threads, rows, squares)


@reordered()
def _some(first: int, last: int, rows: _Floats, squares: _Floats) -> None:
    for i in range(first, last):
        total = 0.0
        for start in range(0, rows.shape[1], PIECE):
            piece = rows[i, start : start + PIECE]
            part = rows.dtype.type(0)
            for j in range(len(piece)):
                part += piece[j] * piece[j]
            total += part
        squares[i] = total
