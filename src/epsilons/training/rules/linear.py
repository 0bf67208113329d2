"""Linear maps: ‖Σ_t g_t a_tᵀ‖² without forming the sum, where that is cheaper."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from epsilons.training.rules.registry import (
    Term,
    chunks,
    norm_rule,
    precise,
    square_norms,
)

CANCELLATION = 1e-2  # below this share of Σ_t‖a_t‖²‖g_t‖², a float32 Gram form errs above 1e-5


class Linear(Term):
    """The weight of y = a Wᵀ: gradient Σ_t g_t a_tᵀ, a: (B, T, d), g: (B, T, p).

    norm² = ‖a‖²‖g‖² for T = 1 and ⟨aaᵀ, ggᵀ⟩ in general (Goodfellow 2015; Li et al. 2022),
    formed instead where that takes fewer operations or where the Gram form would cancel.
    """

    def __init__(self, data: Tensor, transposed: bool = False) -> None:
        super().__init__(data)
        self.transposed = transposed

    def _operands(self, g: Tensor) -> tuple[Tensor, Tensor]:
        assert self.data is not None
        return precise(self.data).flatten(1, -2), precise(g).flatten(1, -2)

    def gradients(self, g: Tensor) -> Tensor:
        a, g = self._operands(g)
        return torch.bmm(a.mT, g) if self.transposed else torch.bmm(g.mT, a)

    def forms(self, g: Tensor) -> bool:
        a, g = self._operands(g)
        return a.shape[1] > 1 and 2 * a.shape[1] ** 2 > a.shape[2] * g.shape[2]

    def square_norms(self, g: Tensor) -> Tensor:
        forms = self.forms(g)
        a, g = self._operands(g)
        if a.shape[1] == 1:
            return square_norms(a) * square_norms(g)
        each = 4 * (a.shape[2] * g.shape[2] if forms else 2 * a.shape[1] ** 2)
        block = _formed if forms else _gram
        return torch.cat([block(a[rows], g[rows]) for rows in chunks(len(g), each)])

    def weighted_sum(self, g: Tensor, factors: Tensor) -> Tensor:
        a, g = self._operands(g)
        g = g * factors.to(g.dtype)[:, None, None]
        a, g = a.flatten(0, 1), g.flatten(0, 1)
        return a.mT @ g if self.transposed else g.mT @ a

    def joined(self, others: list[Term], gs: list[Tensor]) -> tuple[Term, Tensor] | None:
        if not all(isinstance(o, Linear) and o.transposed == self.transposed for o in others):
            return None
        pairs = [o._operands(g) for o, g in zip(others, gs, strict=True) if isinstance(o, Linear)]
        a = torch.cat([a for a, _ in pairs], 1)
        return Linear(a, self.transposed), torch.cat([g for _, g in pairs], 1)


def _formed(a: Tensor, g: Tensor) -> Tensor:
    return square_norms(torch.bmm(g.mT, a))


def _gram(a: Tensor, g: Tensor) -> Tensor:
    aa, gg = torch.bmm(a, a.mT), torch.bmm(g, g.mT)
    squares = (aa * gg).sum((1, 2))
    terms = (aa.diagonal(dim1=1, dim2=2) * gg.diagonal(dim1=1, dim2=2)).sum(1)
    cancelled = squares < CANCELLATION * terms
    if bool(cancelled.any()):
        squares[cancelled] = _formed(a[cancelled], g[cancelled])
    return squares


class Bias(Term):
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
) -> Iterator[tuple[Tensor, Term]]:
    yield weight, Linear(input)
    if bias is not None:
        yield bias, Bias(bias.shape)


@norm_rule(torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__)
def matmul(input: Tensor, other: Tensor) -> Iterator[tuple[Tensor, Term]]:
    if other.dim() == 2 and input.dim() > 2:
        yield other, Linear(input, transposed=True)
