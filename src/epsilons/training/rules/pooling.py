"""Max pooling by compiled loops, in host memory.

It has no weights, so that torch's own kernel would do. But that one looks at one window after the
other; here a picture is compared with itself, moved, many places at a time.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray
from torch import Tensor

from epsilons.training.compiled import addressable
from epsilons.training.threads import go_through, share_out

Sizes = tuple[int, ...]

_MOST = 256  # places of a window, which are told apart by a byte

_Floats = NDArray[Any]
_Bytes = NDArray[np.uint8]
_compiled = njit(cache=True, nogil=True, error_model="numpy")


def fits(x: Tensor, kernel: Sizes) -> bool:
    """Whether these are pictures (B, c, h, w) with windows inside that the loops take."""
    if x.dim() != 4 or len(kernel) != 2 or not addressable(x) or not x.is_contiguous():
        return False
    inside = all(0 < k <= size for k, size in zip(kernel, x.shape[2:], strict=True))
    return inside and math.prod(kernel) <= _MOST


def max_pool(x: Tensor, kernel: Sizes, stride: Sizes) -> tuple[Tensor, Tensor]:
    """The largest number of every window (B, c, h', w'), and which of the window's it is.

    The first of equal ones; NaN, where there is one.
    """
    batch, channels, *size = x.shape
    rows, columns = ((n - k) // s + 1 for n, k, s in zip(size, kernel, stride, strict=True))
    out = x.new_empty(batch, channels, rows, columns)
    which = torch.empty(out.shape, dtype=torch.uint8)
    walk = (*kernel, *stride)
    planes = batch * channels
    share_out(planes, _some, _at_once, x, out, which.numpy(), *walk)
    return out, which


def max_pool_back(
    g: Tensor, which: Tensor, size: torch.Size, kernel: Sizes, stride: Sizes
) -> Tensor:
    """∂x (B, c, h, w) from what came back to every window."""
    dx = g.new_empty(size)
    planes = size[0] * size[1]
    share_out(planes, _some_back, _back_at_once, g, which.numpy(), dx, kernel[1], *stride)
    return dx


@_compiled
def _at_once(threads: int, count: int, *operands: Any) -> Any:
    return go_through(_some, threads, count, operands)


@_compiled
def _back_at_once(threads: int, count: int, *operands: Any) -> Any:
    return go_through(_some_back, threads, count, operands)


@_compiled
def _some(
    first: int,
    last: int,
    x: _Floats,
    out: _Floats,
    which: _Bytes,
    tall: int,
    broad: int,
    down: int,
    across: int,
) -> None:
    """Every place of a plane is taken for a window's corner; what isn't one is not kept."""
    channels, width = x.shape[1], x.shape[3]
    rows, columns = out.shape[2:]
    count = (rows - 1) * down * width + (columns - 1) * across + 1
    best, found = np.empty(count, x.dtype), np.empty(count, np.int32)
    for i in range(first, last):
        plane = x[i // channels, i % channels].reshape(-1)
        best[:] = plane[:count]
        found[:] = 0
        for k in range(1, tall * broad):
            seen = plane[k // broad * width + k % broad :]
            _compare(seen, np.int32(k), best, found)
        values, places = out[i // channels, i % channels], which[i // channels, i % channels]
        for r in range(rows):
            for c in range(columns):
                at = r * down * width + c * across
                values[r, c], places[r, c] = best[at], found[at]


@_compiled
def _compare(seen: _Floats, k: np.int32, best: _Floats, found: NDArray[np.int32]) -> None:
    for p in range(best.size):
        value, most = seen[p], best[p]
        better = (value > most) | (value != value)
        best[p] = value if better else most
        found[p] = k if better else found[p]


@_compiled
def _some_back(
    first: int,
    last: int,
    g: _Floats,
    which: _Bytes,
    dx: _Floats,
    broad: int,
    down: int,
    across: int,
) -> None:
    channels, rows, columns = g.shape[1:]
    width = dx.shape[3]
    offsets = np.array([k // broad * width + k % broad for k in range(_MOST)])
    for i in range(first, last):
        given, places = g[i // channels, i % channels], which[i // channels, i % channels]
        plane = dx[i // channels, i % channels].reshape(-1)
        plane[:] = 0
        for r in range(rows):
            for c in range(columns):
                plane[r * down * width + c * across + offsets[places[r, c]]] += given[r, c]
