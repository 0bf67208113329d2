"""Gradient norms of single examples, and the clipped sum that a private step takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.data import Dataset

from .sampling import batch_of

LossFn = Callable[[Any, Any], Tensor]

# Norms carry rounding; clipping and charging leave this much room, so that no bound is exceeded.
MARGIN = 2e-5


def supervised(criterion: Callable[..., Tensor]) -> LossFn:
    """A `loss_fn` for (x, y) batches from a criterion with `reduction="none"`."""

    def loss_fn(model: Any, batch: Any) -> Tensor:
        x, y = batch
        return criterion(model(x), y)

    return loss_fn


def gradient_norms(
    model: nn.Module,
    loss_fn: LossFn,
    data: Dataset[Any],
    *,
    batch_size: int,
    device: torch.device | str | None = None,
) -> NDArray[np.float64]:
    """The norm (n,) of every example's gradient, in data set order."""
    n = len(data)  # type: ignore[arg-type]
    norms = np.empty(n)
    where = device or next(model.parameters()).device
    with torch.random.fork_rng():
        for first in range(0, n, batch_size):
            indices = torch.arange(first, min(first + batch_size, n))
            batch = tree_map(lambda leaf: leaf.to(where), batch_of(data, indices))
            gradients = _per_example(model, loss_fn, batch)
            norms[indices.numpy()] = _norms(gradients).cpu().numpy()
    return norms


def clipped_gradients(
    model: nn.Module,
    loss_fn: LossFn,
    batch: Any,
    bounds: float | Tensor,
    *,
    micro_batch: int | None = None,
) -> tuple[dict[str, Tensor], Tensor]:
    """Clipped sums by parameter name, and the norms (B,)."""
    gradients = _per_example(model, loss_fn, batch)
    norms = _norms(gradients)
    finite = norms.isfinite()
    limits = torch.as_tensor(bounds, dtype=norms.dtype, device=norms.device)
    factors = torch.where(finite, (limits / (norms * (1 + MARGIN))).clamp(max=1), 0)
    sums = {
        name: torch.tensordot(factors.to(g), torch.nan_to_num(g), dims=([0], [0]))
        for name, g in gradients.items()
    }
    return sums, norms


def _per_example(model: nn.Module, loss_fn: LossFn, batch: Any) -> dict[str, Tensor]:
    trainable = {k: p.detach() for k, p in model.named_parameters() if p.requires_grad}

    def loss(parameters: dict[str, Tensor], example: Any) -> Tensor:
        def run(x: Any) -> Any:
            return torch.func.functional_call(model, parameters, (x,))

        one = tree_map(lambda leaf: leaf.unsqueeze(0), example)
        return loss_fn(run, one).squeeze(0)

    gradient = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0), randomness="different")
    found: dict[str, Tensor] = gradient(trainable, batch)
    return found


def _norms(gradients: dict[str, Tensor]) -> Tensor:
    squares = [g.flatten(1).double().square().sum(1) for g in gradients.values()]
    return torch.stack(squares).sum(0).sqrt()
