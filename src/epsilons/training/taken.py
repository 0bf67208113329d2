"""Step: the step just taken, as the body of the loop sees it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn

from epsilons.runs import Run


@dataclass(frozen=True)
class Step:
    """The step just taken.

    `number`: from 0. `loss`: mean of the batch, before the step; private, NaN of an empty batch.
    `replayed`: a process that was stopped had released this step, and may have shown it already.
    `model` and `optimizer`: as the step left them. `run`: the run folder. `main`: whether this
    process is rank 0, the one that writes; in a run of one process it is.
    """

    number: int
    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss: float = field(repr=False)
    run: Run
    replayed: bool
    main: bool = True
    _worst_case: Callable[[], float] | None = field(default=None, repr=False)

    @property
    def worst_case(self) -> float:
        """ε that the run guarantees for what is charged: up to this step, and a few ahead."""
        return (self._worst_case or self.run.journal.worst_case)()
