"""Whether training moves every trainable parameter: adapters that silently never move are named."""

from __future__ import annotations

import warnings
from typing import Self

from torch import Tensor, nn

from epsilons.gradients.norms import trainable

_STEPS = 10  # a learning rate that warms up is above 0 by then
_SAMPLE = 64  # numbers compared of each parameter; noise moves every one of them


class Movement:
    """What the trainable parameters were at first."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._first = {name: _sample(p) for name, p in trainable(model).items()}

    def after(self, steps: int, last: int) -> Self | None:
        """The same while it is early; then None, and a warning if a parameter has not moved."""
        if steps < min(_STEPS, last):
            return self
        now = trainable(self._model)
        still = [name for name, first in self._first.items() if _same(first, now.get(name))]
        if still:
            shown = ", ".join(still[:5]) + (f" and {len(still) - 5} more" if still[5:] else "")
            warnings.warn(
                f"after {steps} steps these trainable parameters are as they were: {shown}. Is "
                "their learning rate 0, or so small that updates are lost in their dtype? Clipping "
                "counts their gradients; set requires_grad=False on what is not to be trained",
                stacklevel=2,
            )
        return None


def _sample(parameter: Tensor) -> Tensor:
    return parameter.detach().flatten()[:_SAMPLE].clone()


def _same(first: Tensor, parameter: Tensor | None) -> bool:
    return parameter is not None and bool((first == _sample(parameter)).all())
