"""Linear maps with their bias by a compiled loop, in host memory.

Libraries write the bias to every row and have the product added to it: what comes out passes
through memory twice. Here the bias is added to a tile of it in registers, which is written once.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from epsilons.training.compiled import addressable, reordered, scratch
from epsilons.training.rules.tiles import COLUMNS, HIGH, SIDE, WIDE, affine, turn
from epsilons.training.threads import go_through, share_out

MOST = 512  # numbers of a row: one chain of sums in single precision errs by less than 1e-5
_LARGEST = 2**17  # numbers of the weight, of which every thread makes a copy that stays near
_LEAST = 2**10  # rows below which turning the weight costs more than is saved
_GROUP = 32 * HIGH  # rows that meet the same part of the weight, one tile after another

_Floats = NDArray[Any]


def fits(x: Tensor, weight: Tensor, bias: Tensor) -> bool:
    """Whether the loop takes x (…, d), weight (p, d) and bias (p,), and is the faster one."""
    if not WIDE:
        return False
    p, d = weight.shape
    whole = p % COLUMNS == 0 and d % SIDE == 0 and 0 < d <= MOST and p * d <= _LARGEST
    if not whole or x.shape[-1] != d or x.numel() < _LEAST * d or bias.shape != (p,):
        return False
    return all(addressable(t) for t in (x, weight, bias))


def linear_map(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x·weightᵀ + bias (…, p)."""
    (p, d), rows = weight.shape, x.numel() // weight.shape[1]
    out = x.new_empty(*x.shape[:-1], p)
    operands = x.reshape(rows, d), weight, bias, out.view(rows, p)
    share_out(rows // HIGH, _some, _at_once, *operands)
    return out


@reordered()
def _at_once(threads: int, count: int, *operands: Any) -> Any:
    return go_through(_some, threads, count, operands)


@reordered()
def _some(first: int, last: int, x: _Floats, weight: _Floats, bias: _Floats, out: _Floats) -> None:
    """Some tiles of rows; to the last of all belong those that are left over."""
    (rows, d), p = x.shape, len(weight)
    stop = rows if last == rows // HIGH else last * HIGH
    numbers, turned, results = x.reshape(-1), _turned(weight), out.reshape(-1)
    for group in range(first * HIGH, stop, _GROUP):
        for column in range(0, p, COLUMNS):
            for start in range(group, min(group + _GROUP, stop), HIGH):
                row = min(start, stop - HIGH)  # the last tile may share rows with the one before
                to = row * p + column
                affine(numbers, row * d, d, turned, column * d, d, bias, column, results, to, p)


@reordered()
def _turned(weight: _Floats) -> _Floats:
    """The transposed weight by panels of columns, row by row."""
    p, d = weight.shape
    numbers, panels = weight.reshape(-1), scratch(weight.size, np.float32)
    for panel in range(0, p, COLUMNS):
        for column in range(0, COLUMNS, SIDE):
            source, to = (panel + column) * d, panel * d + column
            for j in range(0, d, SIDE):
                turn(numbers, source + j, d, panels, to + j * COLUMNS, COLUMNS)
    return panels
