"""What is trained: the same parameters from first to last, and each of them moves."""

from __future__ import annotations

import warnings
from typing import NamedTuple, Self

import torch
from torch import nn

from epsilons.gradients.norms import trainable
from epsilons.training.checksum import checksum

MOVED_BY = 10  # steps; a learning rate that warms up is above 0 by then


class Trained(NamedTuple):
    """The trainable parameters of a model by name, and those that an optimizer has."""

    names: list[str]
    in_optimizer: list[int]

    @classmethod
    def of(cls, model: nn.Module, optimizer: torch.optim.Optimizer) -> Self:
        held = [id(p) for group in optimizer.param_groups for p in group["params"]]
        return cls(list(trainable(model)), held)

    def expect_same(self, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        """ValueError if they are others by `step`."""
        if Trained.of(model, optimizer) != self:
            raise ValueError(
                f"before step {step} the loop changed which parameters are trained, or which the "
                "optimizer has; they are fixed for a run. Freeze and unfreeze between two runs"
            )


class Movement:
    """What the trainable parameters were at first, each by a checksum of its bits."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._first = {name: checksum(p) for name, p in trainable(model).items()}

    def after(self, steps: int, last: int = MOVED_BY) -> Self | None:
        """The same while it is early; then None, and a warning if a parameter has not moved.

        `last`: how many steps the run has, if fewer are all there are.
        """
        if steps < min(MOVED_BY, last):
            return self
        now = trainable(self._model)
        still = [
            n for n, first in self._first.items() if n in now and bool(checksum(now[n]) == first)
        ]
        if still:
            shown = ", ".join(still[:5]) + (f" and {len(still) - 5} more" if still[5:] else "")
            warnings.warn(
                f"after {steps} steps these trainable parameters are as they were: {shown}. Is "
                "their learning rate 0, or so small that updates are lost in their dtype? Clipping "
                "counts their gradients; set requires_grad=False on what is not to be trained",
                stacklevel=2,
            )
        return None
