"""Normalisation within one example: group, layer, RMS and instance norm."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from epsilons.gradients.rules.conv import ChannelBias
from epsilons.gradients.rules.elementwise import Scale
from epsilons.gradients.rules.linear import Bias
from epsilons.gradients.rules.registry import GradientRule, norm_rule, precise


class ChannelScale(GradientRule):
    """γ of group and instance norm: gradient Σ x̂·g per channel, data: (B, M, C, …)."""

    def __init__(self, data: Tensor, groups: int, eps: float) -> None:
        super().__init__(data)
        self.groups, self.eps = groups, eps

    def gradients(self, g: Tensor) -> Tensor:
        assert self.data is not None
        a, g = precise(self.data), precise(g)
        b, m, c = a.shape[:3]
        ds = (a * g).flatten(3).sum(3) if a.dim() > 3 else a * g
        db = g.flatten(3).sum(3) if a.dim() > 3 else g
        grouped = a.reshape(b, m, self.groups, -1)
        var, mean = torch.var_mean(grouped, dim=3, correction=0)
        rstd = (var + self.eps).rsqrt()
        each = c // self.groups
        mean, rstd = mean.repeat_interleave(each, 2), rstd.repeat_interleave(each, 2)
        return ((ds - db * mean) * rstd).sum(1)


class Normalised(Scale):
    """γ of layer and RMS norm: the data, normalised over the last dimensions, scales it."""

    def __init__(self, data: Tensor, shape: torch.Size, eps: float | None, centred: bool) -> None:
        super().__init__(data, shape)
        self.eps, self.centred = eps, centred

    def gradients(self, g: Tensor) -> Tensor:
        assert self.data is not None
        scale = Scale(
            normalised(precise(self.data), self.shape, self.eps, self.centred), self.shape
        )
        return scale.gradients(g)


def normalised(x: Tensor, shape: Sequence[int], eps: float | None, centred: bool) -> Tensor:
    """x with mean 0 (if centred) and mean square 1 over its last dimensions."""
    if centred:
        return F.layer_norm(x, list(shape), eps=1e-5 if eps is None else eps)
    return F.rms_norm(x, list(shape), eps=eps)


@norm_rule(F.group_norm)
def group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Iterator[tuple[Any, GradientRule]]:
    if _by_channel(input, weight, bias):
        yield weight, ChannelScale(input, num_groups, eps)
        yield bias, ChannelBias()


@norm_rule(F.instance_norm)
def instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Iterator[tuple[Any, GradientRule]]:
    if use_input_stats and _by_channel(input, weight, bias):
        yield weight, ChannelScale(input, input.shape[2], eps)
        yield bias, ChannelBias()


def _by_channel(input: Tensor, *weights: Tensor | None) -> bool:
    """Whether the channels are an example's own, and not those of a whole batch side by side."""
    return all(w is None or w.numel() == input.shape[2] for w in weights)


@norm_rule(F.layer_norm)
def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Iterator[tuple[Any, GradientRule]]:
    shape = torch.Size(normalized_shape)
    yield weight, Normalised(input, shape, eps, centred=True)
    yield bias, Bias(shape)


@norm_rule(F.rms_norm)
def rms_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Iterator[tuple[Any, GradientRule]]:
    yield weight, Normalised(input, torch.Size(normalized_shape), eps, centred=False)
