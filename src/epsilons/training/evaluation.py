"""Losses and correctness of every example under a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.data import Dataset, default_collate

from epsilons.gradients.isolation import own_generators
from epsilons.gradients.norms import LossFn
from epsilons.training.sampling import Collate, batch_of

CorrectFn = Callable[[nn.Module, Any], Tensor]
Outcomes = tuple[NDArray[np.float64], NDArray[np.bool_] | None]


def correct_class(model: nn.Module, batch: Any) -> Tensor:
    """Whether the largest output is the label, for (x, y) batches of a classifier.

    `model` gives (B, classes); `batch` is a pair (x, y) with labels y (B,). The result (B,) is
    boolean.
    """
    x, y = batch
    right: Tensor = model(x).argmax(dim=1) == y
    return right


def to_device(batch: Any, where: torch.device) -> Any:
    return tree_map(lambda leaf: leaf.to(where) if isinstance(leaf, Tensor) else leaf, batch)


def outcomes(
    model: nn.Module,
    loss_fn: LossFn,
    correct_fn: CorrectFn | None,
    data: Dataset[Any],
    where: torch.device,
    collate_fn: Collate = default_collate,
    *,
    at_a_time: int,
    part: tuple[int, int] | None = None,
    beat: Callable[[], None] = lambda: None,
) -> Outcomes:
    """Losses (k,) and, with a `correct_fn`, correctness (k,), in evaluation mode.

    Of all, or from the first of `part` to before its last. `beat` is called after every batch.
    Modes of the modules and random generators are left as they were.
    """
    begin, end = (0, len(data)) if part is None else part  # type: ignore[arg-type]
    losses, correct = np.empty(end - begin), np.empty(end - begin, dtype=bool)
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with own_generators(where, seed=0), torch.no_grad():
            for first in range(begin, end, at_a_time):
                chosen = torch.arange(first, min(first + at_a_time, end))
                here = slice(first - begin, first - begin + len(chosen))
                batch = to_device(batch_of(data, chosen, collate_fn), where)
                losses[here] = loss_fn(model, batch).double().cpu().numpy()
                if correct_fn is not None:
                    correct[here] = correct_fn(model, batch).cpu().numpy()
                beat()
    finally:
        for module, training in modes:
            module.training = training
    return losses, correct if correct_fn is not None else None
