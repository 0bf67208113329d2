"""Squares and products summed along rows by compiled loops, in host memory."""

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
    share_out(n, _some, _at_once, rows, squares)
    return squares


def products_of_squares(a: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Σ_j a_ij² · Σ_j g_ij² and Σ_j g_ij², (N,) each, for a (N, d) and g (N, p) as above."""
    n = a.shape[0]
    products, squares = a.new_empty(n), a.new_empty(n)
    share_out(n, _some_products, _products_at_once, a, g, products, squares)
    return products, squares


def row_sums(rows: Tensor, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Σ_j rows_ij², Σ_j rows_ij like_kj and Σ_j rows_ij, (N,) each, read once; k = i modulo K.

    rows (N, d) and like (K, d) in single precision, contiguous.
    """
    found = rows.new_empty(3, rows.shape[0])
    share_out(rows.shape[0], _some_sums, _sums_at_once, rows, like, found)
    squares, products, totals = found
    return squares, products, totals


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


@reordered()
def _products_at_once(threads: int, count: int, *operands: Any) -> Any:
    return go_through(_some_products, threads, count, operands)


@reordered()
def _some_products(
    first: int, last: int, a: _Floats, g: _Floats, products: _Floats, squares: _Floats
) -> None:
    for i in range(first, last):
        length = square(g[i])
        products[i], squares[i] = square(a[i]) * length, length


@reordered()
def _sums_at_once(threads: int, count: int, *operands: Any) -> Any:
    return go_through(_some_sums, threads, count, operands)


@reordered()
def _some_sums(first: int, last: int, rows: _Floats, like: _Floats, found: _Floats) -> None:
    for i in range(first, last):
        its = like[i % like.shape[0]]
        square, product, total = 0.0, 0.0, 0.0
        for start in range(0, rows.shape[1], PIECE):
            a, b = rows[i, start : start + PIECE], its[start : start + PIECE]
            squares = products = totals = rows.dtype.type(0)
            for j in range(len(a)):
                squares += a[j] * a[j]
                products += a[j] * b[j]
                totals += a[j]
            square += squares
            product += products
            total += totals
        found[0, i], found[1, i], found[2, i] = square, product, total
