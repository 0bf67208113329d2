"""Convolutions in one, two and three dimensions, plain and transposed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from epsilons.training.rules.registry import Term, chunks, norm_rule, precise, square_norms

Sizes = tuple[int, ...]


class Conv(Term):
    """The weight of a convolution: gradient Σ_t g_t p_tᵀ over output places t with patches p_t.

    `swapped` is the transposed convolution, where data and output gradient change roles.
    """

    def __init__(
        self,
        data: Tensor,
        kernel: Sizes,
        stride: Sizes,
        before: Sizes,
        dilation: Sizes,
        groups: int,
        swapped: bool = False,
    ) -> None:
        super().__init__(data)
        self.kernel, self.stride, self.before = kernel, stride, before
        self.dilation, self.groups, self.swapped = dilation, groups, swapped

    def _images(self, g: Tensor) -> tuple[Tensor, Tensor, int]:
        """Patch source and place gradients, (B·M, C, …) each, and the images M per example."""
        assert self.data is not None
        a, g = precise(self.data), precise(g)
        per_example = a.shape[1]
        a, g = a.flatten(0, 1), g.flatten(0, 1)
        return (g, a, per_example) if self.swapped else (a, g, per_example)

    def gradients(self, g: Tensor) -> Tensor:
        source, places, per_example = self._images(g)
        count = len(source)
        p = self._patches(source, places.shape[2:])  # (N, groups, C/groups·k, T)
        q = places.reshape(count * self.groups, -1, math.prod(places.shape[2:]))
        formed = torch.bmm(q, p.flatten(0, 1).mT)  # (N·groups, O/groups, C/groups·k)
        formed = formed.view(count // per_example, per_example, places.shape[1], -1, *self.kernel)
        return formed.sum(1)

    def square_norms(self, g: Tensor) -> Tensor:
        assert self.data is not None
        places = (self.data if self.swapped else g).shape[3:]
        channels = (g if self.swapped else self.data).shape[1:3]
        each = 4 * math.prod(channels) * math.prod(self.kernel) * math.prod(places)
        return torch.cat(
            [square_norms(self.rows(part).gradients(g[part])) for part in chunks(len(g), each)]
        )

    def _patches(self, source: Tensor, places: Sequence[int]) -> Tensor:
        padding: list[int] = []
        for d in reversed(range(len(self.kernel))):
            reach = (places[d] - 1) * self.stride[d] + (self.kernel[d] - 1) * self.dilation[d] + 1
            padding += [self.before[d], reach - self.before[d] - source.shape[2 + d]]
        padded = F.pad(source, padding)
        n, c, *strides = padded.stride()
        return padded.as_strided(
            (len(padded), padded.shape[1], *self.kernel, *places),
            (
                n,
                c,
                *(s * d for s, d in zip(strides, self.dilation, strict=True)),
                *(s * d for s, d in zip(strides, self.stride, strict=True)),
            ),
        ).reshape(len(padded), self.groups, -1, math.prod(places))


class ChannelBias(Term):
    """A bias per channel: gradient Σ g over everything but dimension `channel` of a row."""

    def __init__(self, channel: int = 1) -> None:
        super().__init__(None)
        self.channel = channel + 1

    def gradients(self, g: Tensor) -> Tensor:
        others = [d for d in range(1, g.dim()) if d != self.channel]
        return precise(g).sum(others)


def _conv(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sizes = 1,
    padding: int | str | Sizes = 0,
    dilation: int | Sizes = 1,
    groups: int = 1,
) -> Iterator[tuple[Tensor, Term]]:
    kernel = tuple(weight.shape[2:])
    if input.dim() != len(kernel) + 3:
        return
    strides, dilations = _sizes(stride, kernel), _sizes(dilation, kernel)
    if padding == "same":
        before = tuple(d * (k - 1) // 2 for d, k in zip(dilations, kernel, strict=True))
    else:
        before = _sizes(0 if isinstance(padding, str) else padding, kernel)
    yield weight, Conv(input, kernel, strides, before, dilations, groups)
    if bias is not None:
        yield bias, ChannelBias()


def _conv_transpose(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sizes = 1,
    padding: int | Sizes = 0,
    output_padding: int | Sizes = 0,
    groups: int = 1,
    dilation: int | Sizes = 1,
) -> Iterator[tuple[Tensor, Term]]:
    kernel = tuple(weight.shape[2:])
    if input.dim() != len(kernel) + 3:
        return
    strides, before, dilations = (_sizes(o, kernel) for o in (stride, padding, dilation))
    yield weight, Conv(input, kernel, strides, before, dilations, groups, swapped=True)
    if bias is not None:
        yield bias, ChannelBias()


def _sizes(option: int | Sequence[int], kernel: Sizes) -> Sizes:
    if isinstance(option, int):
        return (option,) * len(kernel)
    return tuple(option) * (len(kernel) if len(option) == 1 else 1)


norm_rule(torch.conv1d, torch.conv2d, torch.conv3d, F.conv1d, F.conv2d, F.conv3d)(_conv)
norm_rule(
    torch.conv_transpose1d,
    torch.conv_transpose2d,
    torch.conv_transpose3d,
    F.conv_transpose1d,
    F.conv_transpose2d,
    F.conv_transpose3d,
)(_conv_transpose)
