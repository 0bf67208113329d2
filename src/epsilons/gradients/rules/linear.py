"""Linear maps: ‖Σ_t g_t a_tᵀ‖² without materializing the sum, where that is cheaper."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from epsilons.gradients.rules.contractions import (
    ghost_norms,
    gram,
    outer_norms,
    summed_products,
)
from epsilons.gradients.rules.registry import (
    GradientRule,
    chunks,
    materialized_sum,
    norm_rule,
    precise,
    replace_cancelled,
    square_norms,
)

_FEW = 2**18  # numbers that are materialized sooner than a ghost norm's calls are made


class Linear(GradientRule):
    """The weight of y = a Wᵀ: gradient Σ_t g_t a_tᵀ, a: (B, …, d), g: (B, …, p).

    norm² = ‖a‖²‖g‖² for T = 1 and ⟨aaᵀ, ggᵀ⟩ in general (Goodfellow 2015; Li et al. 2022),
    materialized instead where that takes fewer operations or where the ghost norm would cancel.
    """

    def __init__(self, data: Tensor, transposed: bool = False) -> None:
        super().__init__(data)
        self.transposed = transposed

    def operands(self, g: Tensor) -> tuple[Tensor, Tensor]:
        """a (B, T, d) and g (B, T, p), in float32 or better."""
        assert self.data is not None
        return _sequences(precise(self.data)), _sequences(precise(g))

    def gradients(self, g: Tensor) -> Tensor:
        a, g = self.operands(g)
        left, right = (a, g) if self.transposed else (g, a)
        return summed_products(left.mT, right.mT)

    def materializes(self, g: Tensor) -> bool:
        return _materializes(*self.operands(g))

    def square_norms(self, g: Tensor) -> Tensor:
        assert self.data is not None
        if g.numel() == g.shape[0] * g.shape[-1]:  # one position
            return outer_norms(square_norms(precise(self.data)), square_norms(precise(g)))
        a, g = self.operands(g)
        materializes = _materializes(a, g)
        each = 4 * a.shape[2] * g.shape[2] if materializes else 8 * a.shape[1] ** 2
        norms, parts = _materialized if materializes else _ghost, chunks(len(g), each)
        if len(parts) <= 1:
            return norms(a, g)
        return torch.cat([norms(a[rows], g[rows]) for rows in parts])

    def weighted_sum(self, g: Tensor, factors: Tensor) -> Tensor:
        assert self.data is not None
        a, g = precise(self.data), precise(g)
        positions = g.numel() // (g.shape[0] * g.shape[-1]) if g.numel() else 1
        if positions > 1 and factors.dtype == torch.float64:
            return materialized_sum(self, g, factors, a.shape[-1] * g.shape[-1])
        a, g = _rows(a).to(factors.dtype), _rows(g).to(factors.dtype)
        each = factors.repeat_interleave(positions).unsqueeze(1)
        a, g = (a * each, g) if a.shape[1] < g.shape[1] else (a, g * each)
        return a.mT @ g if self.transposed else g.mT @ a


def _rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.dim() == 2 else tensor.flatten(0, -2)


def _sequences(rows: Tensor) -> Tensor:
    """(B, T, d), whatever lies between the first and the last dimension."""
    if rows.dim() == 3:
        return rows
    return rows.unsqueeze(1) if rows.dim() == 2 else rows.flatten(1, -2)


def _materializes(a: Tensor, g: Tensor) -> bool:
    """Whether materializing costs less than products of pairs of positions."""
    positions, materialized = a.shape[1], a.shape[2] * g.shape[2]
    return positions > 1 and (2 * positions**2 > materialized or len(a) * materialized <= _FEW)


def _materialized(a: Tensor, g: Tensor) -> Tensor:
    return square_norms(summed_products(g.mT, a.mT))


def _ghost(a: Tensor, g: Tensor) -> Tensor:
    squares, cancelled = ghost_norms(gram(a), gram(g))
    replace_cancelled(squares, cancelled, Linear(a), g)
    return squares


class Bias(GradientRule):
    """Anything added to the output's last dimensions: gradient Σ g over the others."""

    def __init__(self, shape: torch.Size) -> None:
        super().__init__(None)
        self.shape = shape

    def gradients(self, g: Tensor) -> Tensor:
        return summed_to(precise(g), self.shape)


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
) -> Iterator[tuple[Tensor, GradientRule]]:
    if weight.dim() != 2:
        return
    yield weight, Linear(input)
    if bias is not None:
        yield bias, Bias(bias.shape)


@norm_rule(torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__)
def matmul(input: Tensor, other: Tensor) -> Iterator[tuple[Tensor, GradientRule]]:
    if other.dim() == 2 and input.dim() > 2:
        yield other, Linear(input, transposed=True)
