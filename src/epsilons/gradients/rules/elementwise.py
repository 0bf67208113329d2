"""Raw parameters that are added to the data or scale it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from epsilons.gradients.rules.linear import Bias, summed_to
from epsilons.gradients.rules.registry import GradientRule, norm_rule, precise


class Scale(GradientRule):
    """The factor in y = a · w: gradient Σ a · g over what w was broadcast along."""

    def __init__(self, data: Tensor, shape: torch.Size) -> None:
        super().__init__(data)
        self.shape = shape

    def gradients(self, g: Tensor) -> Tensor:
        assert self.data is not None
        data = precise(self.data)
        missing = (1,) * (g.dim() - data.dim())
        return summed_to(
            data.reshape(len(data), *missing, *data.shape[1:]) * precise(g), self.shape
        )


@norm_rule(torch.add, torch.Tensor.add, torch.Tensor.__add__, torch.Tensor.__radd__, data=None)
def add(input: Any, other: Any, *, alpha: float = 1) -> Iterator[tuple[Tensor, GradientRule]]:
    if alpha == 1:
        yield input, Bias(getattr(input, "shape", torch.Size()))
        yield other, Bias(getattr(other, "shape", torch.Size()))


@norm_rule(torch.mul, torch.Tensor.mul, torch.Tensor.__mul__, torch.Tensor.__rmul__, data=None)
def mul(input: Any, other: Any) -> Iterator[tuple[Tensor, GradientRule]]:
    for weight, data in ((input, other), (other, input)):
        if isinstance(weight, Tensor) and isinstance(data, Tensor):
            yield weight, Scale(data, weight.shape)
