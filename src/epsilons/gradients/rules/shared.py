"""Shared parameters: several uses of one weight as one rule, whose gradient is their sum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from epsilons.gradients.rules.contractions import CANCELLATION
from epsilons.gradients.rules.embedding import Embedding
from epsilons.gradients.rules.linear import Linear
from epsilons.gradients.rules.registry import GradientRule, materialized_sum, replace_cancelled

Pair = tuple[GradientRule, Tensor]  # a rule and the output gradient it is to be applied to


def combined(pairs: Sequence[Pair]) -> Pair | None:
    """One rule for all uses of a weight; None if their gradients must be materialized and added."""
    linear = [(rule, g) for rule, g in pairs if isinstance(rule, Linear)]
    looked_up = [(rule, g) for rule, g in pairs if isinstance(rule, Embedding)]
    alike = len({rule.transposed for rule, _ in linear}) == 1
    if len(linear) == len(pairs) and alike:
        return _along_sequence(linear)
    one_table = len(looked_up) == 1 and len(linear) + 1 == len(pairs)
    if alike and one_table and not linear[0][0].transposed:
        return Tied(looked_up[0], _along_sequence(linear)), looked_up[0][1]
    return None


def _along_sequence(pairs: Sequence[tuple[Linear, Tensor]]) -> tuple[Linear, Tensor]:
    operands = [rule.operands(g) for rule, g in pairs]
    a, g = (torch.cat(column, 1) for column in zip(*operands, strict=True))
    return Linear(a, pairs[0][0].transposed), g


class Tied(GradientRule):
    """A table that is looked up and also maps to logits: gradient E + H, each as in its own rule.

        ‖E + H‖² = ‖E‖² + ‖H‖² + 2 Σ_st q_s[id_t] ⟨a_s, g_t⟩

    with ids and gradients g_t of the look-up, inputs a_s and logit gradients q_s of the map:
    nothing of the table's size is materialized, unless E and H cancel.
    """

    def __init__(self, looked_up: tuple[Embedding, Tensor], mapped: tuple[Linear, Tensor]) -> None:
        super().__init__(None)
        self.looked_up, self.mapped = looked_up, mapped

    def rows(self, chosen: slice | Tensor) -> Self:
        part = super().rows(chosen)
        part.looked_up = (self.looked_up[0].rows(chosen), self.looked_up[1][chosen])
        part.mapped = (self.mapped[0].rows(chosen), self.mapped[1][chosen])
        return part

    def materializes(self, g: Tensor) -> bool:
        return False

    def gradients(self, g: Tensor) -> Tensor:
        return _materialized(self.looked_up) + _materialized(self.mapped)

    def square_norms(self, g: Tensor) -> Tensor:
        (table, its), (linear, q) = self.looked_up, self.mapped
        ids, g = table.positions(its)
        a, q = linear.operands(q)
        logits = q.gather(2, ids.unsqueeze(1).expand(-1, q.shape[1], -1))  # q_s[id_t]: (B, S, T)
        apart = table.square_norms(its) + linear.square_norms(self.mapped[1])
        mixed = logits * torch.bmm(a, g.mT)
        squares = apart + 2 * mixed.sum((1, 2))
        cancelled = squares < CANCELLATION * (apart + 2 * mixed.abs().sum((1, 2)))
        replace_cancelled(squares, cancelled, self, its)
        return squares

    def weighted_sum(self, g: Tensor, factors: Tensor) -> Tensor:
        (table, its), (linear, q) = self.looked_up, self.mapped
        if factors.dtype == torch.float64:  # both may be much larger than their sum
            return materialized_sum(self, g, factors, table.vocabulary * its.shape[-1])
        return table.weighted_sum(its, factors) + linear.weighted_sum(q, factors)


def _materialized(pair: Pair) -> Tensor:
    """Every example's gradient of a pair."""
    return pair[0].gradients(pair[1])
