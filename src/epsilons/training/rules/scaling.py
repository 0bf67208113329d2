"""Rows scaled by a factor each, and summed in the same reading, by a compiled loop."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from epsilons.training.compiled import reordered
from epsilons.training.threads import go_through, share_out

_BLOCK = 64  # rows whose sum is taken in single precision

_Floats = NDArray[Any]


def scaled_rows(rows: Tensor, factors: Tensor) -> tuple[Tensor, Tensor]:
    """factors_i · rows_i (N, d), and their sum over i (d,).

    In single precision, in host memory. Where there are fewer factors than rows, each is for as
    many rows that follow each other.
    """
    n, width = rows.shape
    scaled, sums = rows.new_empty(n, width), rows.new_empty(-(-n // _BLOCK), width)
    share_out(len(sums), _some, _at_once, rows, factors, scaled, sums)
    return scaled, sums.sum(0)


@reordered()
def _at_once(threads: int, count: int, *operands: Any) -> Any:
    return go_through(_some, threads, count, operands)


@reordered()
def _some(
    first: int, last: int, rows: _Floats, factors: _Floats, scaled: _Floats, sums: _Floats
) -> None:
    each = rows.shape[0] // max(len(factors), 1)
    for block in range(first, last):
        total = sums[block]
        total[:] = np.float32(0)
        for i in range(block * _BLOCK, min((block + 1) * _BLOCK, rows.shape[0])):
            row, to, factor = rows[i], scaled[i], factors[i // each]
            for j in range(len(row)):
                value = row[j] * factor
                to[j] = value
                total[j] += value
