"""Linear maps: ‖Σ_t g_t a_tᵀ‖² without forming the sum, where that is cheaper."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from epsilons.training.compiled import compilable
from epsilons.training.rules.contractions import gram, summed_products
from epsilons.training.rules.outer import MOST_PLACES, outer_sums
from epsilons.training.rules.pairs import MOST_NUMBERS, pair_sums
from epsilons.training.rules.registry import (
    Formed,
    Known,
    Term,
    chunks,
    norm_rule,
    precise,
    square_norms,
)
from epsilons.training.rules.scaling import scaled_rows, weighed_products, weighs
from epsilons.training.rules.squares import products_of_squares

CANCELLATION = 1e-2  # below this share of Σ_t‖a_t‖²‖g_t‖², a float32 Gram form errs above 1e-5


class Linear(Term):
    """The weight of y = a Wᵀ: gradient Σ_t g_t a_tᵀ, a: (B, …, d), g: (B, …, p), places between.

    norm² = ‖a‖²‖g‖² for T = 1 and ⟨aaᵀ, ggᵀ⟩ in general (Goodfellow 2015; Li et al. 2022),
    formed instead where that takes fewer operations or where the Gram form would cancel.
    """

    def __init__(self, data: Tensor, transposed: bool = False, bias: Bias | None = None) -> None:
        super().__init__(data)
        self.transposed, self.bias = transposed, bias

    def rows(self, chosen: slice | Tensor) -> Self:
        part = super().rows(chosen)
        part.bias = None  # which has other rows
        return part

    def operands(self, g: Tensor) -> tuple[Tensor, Tensor]:
        """a (B, T, d) and g (B, T, p), in single precision or better."""
        assert self.data is not None
        return _sequences(precise(self.data)), _sequences(precise(g))

    def gradients(self, g: Tensor) -> Tensor:
        a, g = self.operands(g)
        left, right = (a, g) if self.transposed else (g, a)
        return summed_products(left.mT, right.mT)

    def formed(self, g: Tensor) -> tuple[Term, Tensor]:
        a, rows = self.operands(g)
        if not _tiled(a, rows):
            return super().formed(g)
        if self.transposed:
            gradients, squares, _ = outer_sums(rows, a)
            return Formed(squares), gradients
        gradients, squares, sums = outer_sums(a, rows)
        if self.bias is not None:
            self.bias.sums = sums
        return Formed(squares), gradients

    def forms(self, g: Tensor) -> bool:
        return _forms(*self.operands(g))

    def square_norms(self, g: Tensor) -> Tensor:
        assert self.data is not None
        if g.numel() == g.shape[0] * g.shape[-1]:  # one place
            products, lengths = _lengths(precise(self.data), precise(g))
            if self.bias is not None:
                self.bias.squares = lengths
            return products
        a, g = self.operands(g)
        if _forms(a, g):
            parts = chunks(len(g), 4 * a.shape[2] * g.shape[2])
            return torch.cat([_formed(a[rows], g[rows]) for rows in parts])
        scratch = 0 if _paired(a, g) else 8 * a.shape[1] ** 2
        parts = chunks(a.shape[0], scratch)
        if len(parts) <= 1:
            squares, sums = _gram(a, g)
        else:
            found = [_gram(a[rows], g[rows]) for rows in parts]
            squares, sums = (torch.cat(column) for column in zip(*found, strict=True))
        if self.bias is not None:
            self.bias.squares = sums
        return squares

    def weighted_sum(self, g: Tensor, factors: Tensor) -> Tensor:
        return self.prepared_sum(g, factors)()

    def prepared_sum(self, g: Tensor, factors: Tensor) -> Callable[[], Tensor]:
        assert self.data is not None
        a, g = _rows(precise(self.data)), _rows(precise(g))
        factors = factors.to(g.dtype)
        sums_g = self.bias is not None and self.bias.squares is not None
        if (sums_g or g.shape[1] <= a.shape[1]) and compilable(g):
            products = None
            if not self.transposed and weighs(g, a):
                products, total = weighed_products(g, factors, a)
            else:
                g, total = scaled_rows(g, factors)
            if self.bias is not None and sums_g:
                self.bias.total = total
            if products is not None:
                return lambda: products
        else:
            each = factors.repeat_interleave(g.shape[0] // factors.shape[0]).unsqueeze(1)
            a, g = (a * each, g) if a.shape[1] < g.shape[1] else (a, g * each)
        left, right = (a, g) if self.transposed else (g, a)
        return lambda: left.mT @ right


def _lengths(a: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """‖a_i‖²‖g_i‖² and ‖g_i‖² of examples."""
    if compilable(a) and compilable(g) and a.dim() == 2:
        return products_of_squares(a, g)
    lengths = square_norms(g)
    return square_norms(a) * lengths, lengths


def _rows(places: Tensor) -> Tensor:
    return places if places.dim() == 2 else places.flatten(0, -2)


def _sequences(rows: Tensor) -> Tensor:
    """(B, T, d), whatever lies between the first and the last dimension."""
    if rows.dim() == 3:
        return rows
    return rows.unsqueeze(1) if rows.dim() == 2 else rows.flatten(1, -2)


def _forms(a: Tensor, g: Tensor) -> bool:
    """Whether forming costs less than products of pairs of places."""
    places, formed = a.shape[1], a.shape[2] * g.shape[2]
    if _paired(a, g):  # half of the products, and nothing is written
        return places > 1 and places * (a.shape[2] + g.shape[2]) > 1.5 * formed
    return places > 1 and 2 * places**2 > formed


def _tiled(a: Tensor, g: Tensor) -> bool:
    """Whether sums of outer products are a compiled loop's to form."""
    return 1 < a.shape[1] <= MOST_PLACES and compilable(a) and compilable(g)


def _paired(a: Tensor, g: Tensor) -> bool:
    """Whether products of pairs of places are a compiled loop's to sum."""
    return max(a.shape[2], g.shape[2]) <= MOST_NUMBERS and compilable(a) and compilable(g)


def _formed(a: Tensor, g: Tensor) -> Tensor:
    return outer_sums(a, g)[1] if _tiled(a, g) else square_norms(summed_products(g.mT, a.mT))


def _gram(a: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Squared norms of Σ_t g_t a_tᵀ and of Σ_t g_t, which the same products hold."""
    if _paired(a, g):
        squares, sums, cancelled = pair_sums(a, g, CANCELLATION)
    else:
        aa, gg = gram(a), gram(g)
        products = aa.mul_(gg)
        squares, sums = products.sum((1, 2)), gg.sum((1, 2))
        terms, lengths = (p.diagonal(dim1=1, dim2=2).sum(1) for p in (products, gg))
        cancelled = (squares < CANCELLATION * terms) | (sums < CANCELLATION * lengths)
    if bool(cancelled.any()):
        squares[cancelled] = _formed(a[cancelled], g[cancelled])
        sums[cancelled] = square_norms(g[cancelled].sum(1))
    return squares, sums


class Bias(Known):
    """Anything added to the output's last dimensions: gradient Σ g over the others."""

    follows = True

    def __init__(self, shape: torch.Size) -> None:
        super().__init__()
        self.shape = shape
        # From the weight of the same linear map: the gradients, and their weighted sum.
        self.sums: Tensor | None = None
        self.total: Tensor | None = None

    def rows(self, chosen: slice | Tensor) -> Self:
        part = super().rows(chosen)
        part.sums = part.total = None
        return part

    def gradients(self, g: Tensor) -> Tensor:
        return summed_to(precise(g), self.shape) if self.sums is None else self.sums

    def formed(self, g: Tensor) -> tuple[Term, Tensor]:
        return super().formed(g) if self.squares is None else (self, g)  # the weight holds g too

    def forms(self, g: Tensor) -> bool:
        return self.squares is None

    def weighted_sum(self, g: Tensor, factors: Tensor) -> Tensor:
        if self.total is not None:
            total, self.total = self.total, None  # it is for these factors alone
            return total
        if self.squares is None:
            return super().weighted_sum(g, factors)
        rows = precise(g).reshape(-1, *self.shape)
        factors = factors.to(rows.dtype)
        places = rows.shape[0] // factors.shape[0]
        return (factors if places == 1 else factors.repeat_interleave(places)) @ rows


def summed_to(g: Tensor, shape: torch.Size) -> Tensor:
    """g (B, …) summed, example by example, to a shape that was broadcast into it."""
    extra = g.dim() - 1 - len(shape)
    if extra > 0:
        g = g.sum(tuple(range(1, 1 + extra)))
    kept = [d for d, size in enumerate(shape, 1) if size == 1 and g.shape[d] != 1]
    return g.sum(kept, keepdim=True) if kept else g


@norm_rule(F.linear)
def linear(
    input: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Iterator[tuple[Tensor, Term]]:
    if weight.dim() != 2:
        return
    if bias is None:
        yield weight, Linear(input)
        return
    shift = Bias(bias.shape)
    shares = bias.shape == weight.shape[:1]  # and is not one number for all outputs
    yield weight, Linear(input, bias=shift if shares else None)
    yield bias, shift


@norm_rule(torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__)
def matmul(input: Tensor, other: Tensor) -> Iterator[tuple[Tensor, Term]]:
    if other.dim() == 2 and input.dim() > 2:
        yield other, Linear(input, transposed=True)
