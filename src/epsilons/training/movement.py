"""Whether training moves every trainable parameter: adapters that silently never move are named."""

from __future__ import annotations

import warnings
from typing import Self

from torch import nn

from epsilons.gradients.norms import trainable
from epsilons.training.checksum import checksum

MOVED_BY = 10  # steps; a learning rate that warms up is above 0 by then


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
