"""What runs after every step: averaged weights, TensorBoard; several of them: `Callbacks`."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from epsilons.training.taken import Step

OnStep = Callable[[Step], None]


class Ema:
    """An exponential moving average of the weights; as private as they are, being computed of them.

    `on_step=Ema(model, decay=0.999)`, and after training `ema.apply(model)`. `decay` in [0, 1), by
    default 0.999, else ValueError; smaller in the first steps.
    """

    def __init__(self, model: nn.Module, decay: float = 0.999) -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"decay={decay}; expected a number in [0, 1)")
        self._decay = decay
        self._average = {name: p.detach().clone() for name, p in model.named_parameters()}
        self._steps = 0

    def __call__(self, step: Step) -> None:
        self._steps += 1
        # early on, an average of few steps: the first weights are no better than any
        decay = min(self._decay, self._steps / (self._steps + 9))
        with torch.no_grad():
            for name, parameter in step.model.named_parameters():
                self._average[name].lerp_(parameter.detach(), 1 - decay)

    def apply(self, model: nn.Module) -> None:
        """Put the averages into the parameters of `model`."""
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(self._average[name])

    def state_dict(self) -> dict[str, Any]:
        """The averages so far, for a checkpoint."""
        return {"steps": self._steps, "average": self._average}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back a `state` of `state_dict`."""
        self._steps = state["steps"]
        for name, average in state["average"].items():
            self._average[name].copy_(average)


class TensorBoard:
    """Loss, learning rate and worst case so far as events in the run's private half.

    The loss is exact, and so for the curator alone. `every`: so many steps, by default 10.
    """

    def __init__(self, every: int = 10) -> None:
        self._every = every
        self._writer: Any = None

    def __call__(self, step: Step) -> None:
        if step.number % self._every:
            return
        if self._writer is None:
            self._writer = _private_writer(str(step.run.path / "private" / "tensorboard"))
        rate = step.optimizer.param_groups[0]["lr"]
        epsilon = step.run.journal.worst_case()
        for name, value in (("loss", step.loss), ("lr", rate), ("worst_case", epsilon)):
            self._writer.add_scalar(name, value, step.number)
        self._writer.flush()


class Callbacks:
    """Several callbacks as one, called in order; the state of those that have one is kept.

    `callbacks`: each is called with the `Step`.
    """

    def __init__(self, *callbacks: OnStep) -> None:
        self._callbacks = callbacks

    def __call__(self, step: Step) -> None:
        for callback in self._callbacks:
            callback(step)

    def _keeping(self) -> dict[str, Any]:
        return {str(k): c for k, c in enumerate(self._callbacks) if hasattr(c, "state_dict")}

    def state_dict(self) -> dict[str, Any]:
        """The states of the callbacks that have one, for a checkpoint."""
        return {number: callback.state_dict() for number, callback in self._keeping().items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back a `state` of `state_dict`, for the same callbacks in the same order."""
        for number, callback in self._keeping().items():
            callback.load_state_dict(state[number])


def _private_writer(folder: str) -> Any:
    from torch.utils.tensorboard import SummaryWriter

    before = os.umask(0o077)
    try:
        return SummaryWriter(folder)
    finally:
        os.umask(before)
