"""Squares summed along long rows by compiled loops, in host memory."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray
from torch import Tensor

from epsilons.training.compiled import reordered
from epsilons.training.threads import go_through, share_out

PIECE = 4096  # numbers whose squares are summed in single precision

_Floats = NDArray[Any]


def row_squares(rows: Tensor) -> Tensor:
    """Σ_j rows_ij², (N,), for rows (N, d) in single precision.

    Pieces are added in double precision: one long sum would come out too small.
    """
    n = rows.shape[0]
    squares = rows.new_empty(n)
    values, results = rows.detach().contiguous().numpy(), squares.numpy()
    share_out(n, _some, _at_once, values, results)
    return squares


@reordered()
def _at_once(threads: int, count: int, *operands: Any) -> Any:
    return go_through(_some, threads, count, operands)


@reordered()
def _some(first: int, last: int, rows: _Floats, squares: _Floats) -> None:
    for i in range(first, last):
        squares[i] = square(rows[i])


@reordered()
def square(numbers: _Floats) -> float:
    """Σ numbers², for compiled loops."""
    total = 0.0
    for start in range(0, len(numbers), PIECE):
        piece = numbers[start : start + PIECE]
        part = numbers.dtype.type(0)
        for j in range(len(piece)):
            part += piece[j] * piece[j]
        total += part
    return total
