"""Loss functions of the kind that every pass expects: `loss_fn(model, batch)`, one per example."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from epsilons.gradients.norms import LossFn


def supervised(criterion: Callable[..., Tensor]) -> LossFn:
    """A loss function for (x, y) batches: `criterion(model(x), y)`, one loss per example.

    `criterion` is called with `reduction="none"`-style results in mind: (B,) losses, or more
    dimensions, which are averaged within each example.

    >>> import torch
    >>> loss_fn = supervised(torch.nn.CrossEntropyLoss(reduction="none"))
    >>> loss_fn(torch.nn.Linear(3, 2), (torch.zeros(5, 3), torch.zeros(5, dtype=torch.long))).shape
    torch.Size([5])
    """

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            raise ValueError(
                f"supervised takes batches (x, y), and this one is {_described(batch)}. Write "
                "loss_fn yourself, as def loss_fn(model, batch): return "
                'criterion(model(batch["x"]), batch["y"]), with one loss per example.'
            )
        x, y = batch
        losses = criterion(model(x), y)
        return losses.flatten(1).mean(1) if losses.dim() > 1 else losses

    return loss_fn


def _described(batch: Any) -> str:
    kind = type(batch).__name__
    if isinstance(batch, Mapping):
        return f"a {kind} with {', '.join(map(repr, batch))}"
    if isinstance(batch, Tensor):
        return f"one tensor of shape {tuple(batch.shape)}"
    return f"a {kind} of {len(batch)}" if isinstance(batch, (tuple, list)) else f"a {kind}"
