"""Groups of records as single examples: one loss, one gradient, one clip factor for each group.

Of a batch of groups, tensors are (groups, records, …) and every rule sees a group's records as
positions of one example.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from epsilons.gradients.norms import LossFn, check_losses, examples
from epsilons.gradients.trees import swapped, tensors_in


def group_loss(loss_fn: LossFn) -> LossFn:
    """The loss function of whole groups, from that of records: the sum over a group's records.

    Its batches are what `grouped` makes.
    """
    return partial(_group_losses, loss_fn)


def grouped(batch: Any, present: Tensor) -> Any:
    """A batch of groups: `batch` has all their records in turn, as many as there are in `present`.

    `present` (groups, records) says which places have a record. The others are filled with the
    group's first one, and don't count.
    """
    # the place of each record in the batch, and that of the group's first one where there is none
    place = present.flatten().cumsum(0).view(present.shape) - 1
    rows = torch.where(present, place, place[:, :1])
    filled = examples(batch, rows.flatten())
    shaped = {
        id(t): t.view(*present.shape, *t.shape[1:]) for t in tensors_in(filled) if t.dim() > 0
    }
    return swapped(filled, shaped), present


def records_of(loss_fn: LossFn, batch: Any) -> int:
    """How many records each example of a batch has: 1, unless `group_loss` takes it."""
    if isinstance(loss_fn, partial) and loss_fn.func is _group_losses:
        return int(batch[1].shape[1])
    return 1


def _group_losses(loss_fn: LossFn, model: nn.Module, batch: Any) -> Tensor:
    groups, present = batch
    flat = {id(t): t.flatten(0, 1) for t in tensors_in(groups) if t.dim() > 0}
    losses = loss_fn(model, swapped(groups, flat))
    check_losses(losses, present.numel())
    return losses.view(present.shape).where(present, 0.0).sum(1)
