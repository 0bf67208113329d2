"""Rows scaled by a factor each, and summed in the same reading, by compiled loops."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from epsilons.training.compiled import compilable, reordered
from epsilons.training.products import HAS_PRODUCT, multiply
from epsilons.training.threads import HAS_TEAM, go_through, share_out

_BLOCK = 64  # rows whose sum is taken in single precision
_LEAST = 128  # columns of a thread's own, below which the library's way to share is the faster one
_NEAR = 2**19  # numbers that stay in a thread's cache

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


def weighs(g: Tensor, a: Tensor) -> bool:
    """Whether `weighed_products` takes g (N, p) and a (N, d), and is the faster way."""
    threads = torch.get_num_threads()
    if not HAS_PRODUCT or not HAS_TEAM or g.shape[1] < _LEAST * threads:
        return False
    some = 0 < g.numel() <= _NEAR * threads and 0 < a.numel() < 2**31
    return some and compilable(g) and compilable(a)


def weighed_products(g: Tensor, factors: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
    """Σ_i factors_i · g_i a_iᵀ (p, d) and Σ_i factors_i · g_i (p,), factors as above.

    Every thread has columns of g to itself: it scales them and takes their product with a.
    """
    p, d = g.shape[1], a.shape[1]
    products, sums = g.new_empty(p, d), g.new_empty(p)
    share_out(p, _some_columns, _columns_at_once, g, factors, a, products, sums)
    return products, sums


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


@reordered()
def _columns_at_once(threads: int, count: int, *operands: Any) -> Any:
    return go_through(_some_columns, threads, count, operands)


@reordered()
def _some_columns(
    first: int,
    last: int,
    g: _Floats,
    factors: _Floats,
    a: _Floats,
    products: _Floats,
    sums: _Floats,
) -> None:
    (n, d), width = a.shape, last - first
    each = n // max(len(factors), 1)
    scaled, total = np.empty((n, width), np.float32), np.zeros(width)
    part = np.empty(width, np.float32)
    for block in range(0, n, _BLOCK):
        part[:] = np.float32(0)
        for i in range(block, min(block + _BLOCK, n)):
            row, to, factor = g[i, first:last], scaled[i], factors[i // each]
            for j in range(width):
                value = row[j] * factor
                to[j] = value
                part[j] += value
        for j in range(width):
            total[j] += part[j]
    sums[first:last] = total
    multiply(scaled.reshape(-1), a.reshape(-1), products.reshape(-1), first * d, n, width, d)
