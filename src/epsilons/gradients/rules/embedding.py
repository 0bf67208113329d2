"""Embeddings: an example's gradient has one row per distinct id."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from epsilons.gradients.clip_factors import widest_dtype
from epsilons.gradients.rules.registry import GradientRule, UnsupportedLayer, norm_rule, precise


class Embedding(GradientRule):
    """Rows looked up by id: gradient row v = Σ g_t over positions t with id v; data: (B, …) ids."""

    def __init__(self, data: Tensor, vocabulary: int, padding: int | None) -> None:
        super().__init__(data)
        self.vocabulary, self.padding = vocabulary, padding

    def positions(self, g: Tensor) -> tuple[Tensor, Tensor]:
        """Ids (B, T), and gradients (B, T, d) that are zero at the padding."""
        assert self.data is not None
        ids = self.data.flatten(1)
        g = precise(g).reshape(*ids.shape, g.shape[-1])
        if self.padding is not None:
            g = g.masked_fill((ids == self.padding).unsqueeze(2), 0)
        return ids, g

    def materializes(self, g: Tensor) -> bool:
        return False

    def gradients(self, g: Tensor) -> Tensor:
        ids, g = self.positions(g)
        materialized = g.new_zeros(len(g), self.vocabulary, g.shape[2])
        return materialized.scatter_add_(1, ids.unsqueeze(2).expand_as(g), g)

    def square_norms(self, g: Tensor) -> Tensor:
        ids, g = self.positions(g)
        # positions of one id may cancel: their sum is to be the one that is added
        return _rows_of_ids(ids, g.to(widest_dtype(g.device)))[1].square().sum((1, 2))

    def weighted_sum(self, g: Tensor, factors: Tensor) -> Tensor:
        ids, g = self.positions(g)
        total = factors.new_zeros(self.vocabulary, g.shape[2])
        if factors.dtype == torch.float64:  # first by example: its positions may cancel
            ids, g = _rows_of_ids(ids, g.double())
        g = (g * factors[:, None, None]).flatten(0, 1)
        return total.scatter_add_(0, _along(ids, g), g)


def _rows_of_ids(ids: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients added up by id within each example: ids (B, T), of which as many as differ are
    used, and rows (B, T, d), of which the others are zero."""
    count, positions = ids.shape
    ordered, order = ids.sort(stable=True, dim=1)
    numbers = F.pad(ordered[:, 1:] != ordered[:, :-1], (1, 0)).cumsum(1)
    numbers = torch.empty_like(order).scatter_(1, order, numbers)  # of the ids, in their own order
    slots = numbers + positions * torch.arange(count, device=ids.device).unsqueeze(1)
    rows = torch.zeros_like(g).flatten(0, 1).scatter_add_(0, _along(slots, g), g.flatten(0, 1))
    return torch.zeros_like(ids).scatter_(1, numbers, ids), rows.view(g.shape)


def _along(slots: Tensor, g: Tensor) -> Tensor:
    """The slot of every number in rows of gradients."""
    return slots.long().flatten().unsqueeze(1).expand(-1, g.shape[-1])


@norm_rule(F.embedding)
def embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Iterator[tuple[Any, GradientRule]]:
    if max_norm is not None or scale_grad_by_freq:
        raise UnsupportedLayer(
            "embedding with max_norm or scale_grad_by_freq lets one example change another's "
            "gradient. Leave both options off."
        )
    vocabulary = weight.shape[0]
    padding = None if padding_idx is None else padding_idx % vocabulary
    yield weight, Embedding(input, vocabulary, padding)
