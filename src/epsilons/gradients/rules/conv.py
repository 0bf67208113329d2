"""Convolutions in one, two and three dimensions, plain and transposed.

The gradient of an example's weight is Σ_t g_t p_tᵀ over the output pixels t, with the patch p_t
that the filters saw there. It is materialized, or its norm is taken from Gram matrices over pixels
without materializing it: whichever costs less for the sizes at hand.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from epsilons.gradients.rules.contractions import (
    Geometry,
    Sizes,
    by_groups,
    by_patches,
    ghost_norms,
    gram,
    patch_gram,
    shifted_gram,
    symmetric,
    weight_gradient,
)
from epsilons.gradients.rules.registry import (
    GradientRule,
    chunks,
    materialized_sum,
    norm_rule,
    precise,
    replace_cancelled,
    square_norms,
)

# Nanoseconds on one core, fitted to thirty shapes: only their ratios matter, and only for speed.
_FLOP, _COPY, _ADD, _WRITE, _GROUPED, _IMAGE = 1 / 85, 1.2, 0.6, 1.0, 2.2, 1000.0
_CALL = 5000.0  # of torch, which is all that counts for small tensors


class Conv(GradientRule):
    """The weight of a convolution, data: (B, M, C, …) with M images per example, or (B, C, …).

    `swapped` is the transposed convolution, where data and output gradient change roles.
    """

    def __init__(
        self,
        data: Tensor,
        geometry: Geometry,
        bias: Tensor | None = None,
        swapped: bool = False,
    ) -> None:
        super().__init__(data)
        self.geometry, self.bias, self.swapped = geometry, bias, swapped
        self.output: Tensor | None = None
        self._version = 0

    def keep(self, output: Tensor) -> None:
        """Hold on to the output, examples first, for `filter_products`."""
        if not self.materializes(output):
            self.output, self._version = output, output._version

    def rows(self, chosen: slice | Tensor) -> Self:
        part = super().rows(chosen)
        part.output = None if self.output is None else self.output[chosen]
        return part

    def filter_products(self, g: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        """⟨weight_o, R_o⟩ and ⟨1, R_o⟩ by filter, (B, o) each, without the gradient R.

        ⟨w_o, Σ_t g_ot p_t⟩ = Σ_t g_ot y_ot with y the output less its bias b, and likewise for a
        filter of ones. With filters of these `lengths` (o,), their rounding is relative to
        Σ_t |g_ot|(‖p_t‖ + |b_o|/‖w_o‖), which comes last. None where the output wasn't kept, or R
        is materialized anyway.
        """
        source, grads, per_example = self._images(g)
        whole = symmetric(source.shape, grads.shape, self.geometry) and self.geometry.groups == 1
        if self.output is None or self.swapped or per_example > 1 or not whole:
            return None
        if self.materializes(g) or self.output._version != self._version:
            return None  # the version: an activation in place, after the layer
        flat = grads.flatten(2)
        along = (flat * precise(self.output).flatten(0, 1).flatten(2)).sum(2)
        size = flat.abs()
        shares = size.new_zeros(1) if self.bias is None else precise(self.bias).abs() / lengths
        if self.bias is not None:
            along = along - flat.sum(2) * precise(self.bias)
        both = torch.stack([source.sum(1), source.square().sum(1)], 1).flatten(0, 1).unsqueeze(1)
        kernel, stride, before, dilation, _ = self.geometry
        convolve = (F.conv1d, F.conv2d, F.conv3d)[len(kernel) - 1]
        seen = convolve(both, source.new_ones(1, 1, *kernel), None, stride, before, dilation)
        sums, squares = seen.reshape(len(flat), 2, -1).unbind(1)
        totals = torch.bmm(flat, sums.unsqueeze(2)).squeeze(2)
        terms = torch.bmm(size, squares.sqrt().unsqueeze(2)).squeeze(2) + shares * size.sum(2)
        return along, totals, terms

    def _images(self, g: Tensor) -> tuple[Tensor, Tensor, int]:
        """Patch source and output gradients, (B·M, C, …) each, and the images M per example."""
        assert self.data is not None
        a, g, per_example = precise(self.data), precise(g), 1
        if a.dim() > len(self.geometry.kernel) + 2:
            per_example = a.shape[1]
            a, g = a.flatten(0, 1), g.flatten(0, 1)
        return (g, a, per_example) if self.swapped else (a, g, per_example)

    def gradients(self, g: Tensor) -> Tensor:
        source, grads, per_example = self._images(g)
        method = self._method(source, grads, per_example, _MATERIALIZING)
        form = by_groups if method == "groups" else by_patches
        each = form(source, grads, self.geometry)
        return each if per_example == 1 else torch.unflatten(each, 0, (-1, per_example)).sum(1)

    def _method(
        self,
        source: Tensor,
        grads: Tensor,
        per_example: int,
        among: tuple[str, ...] | None = None,
    ) -> str:
        if per_example > 1:
            among = _MATERIALIZING  # an example's images are to be summed
        return _cheapest(source.shape, grads.shape, self.geometry, among)

    def materializes(self, g: Tensor) -> bool:
        return self._method(*self._images(g)) in _MATERIALIZING

    def square_norms(self, g: Tensor) -> Tensor:
        source, grads, per_example = self._images(g)
        method = self._method(source, grads, per_example)
        numbers = per_example * _scratch(source.shape, grads.shape, self.geometry, method)
        parts = chunks(g.shape[0], 4 * numbers)
        if len(parts) <= 1:
            return self._square_norms(g, method)
        return torch.cat([self.rows(part)._square_norms(g[part], method) for part in parts])

    def _square_norms(self, g: Tensor, method: str) -> Tensor:
        if method in _MATERIALIZING:
            return square_norms(self.gradients(g))
        source, grads, _ = self._images(g)
        patches = shifted_gram if method == "shifted grams" else patch_gram
        squares, cancelled = ghost_norms(
            patches(source, grads, self.geometry), gram(grads.flatten(2).mT)
        )
        replace_cancelled(squares, cancelled, self, g)
        return squares

    def weighted_sum(self, g: Tensor, factors: Tensor) -> Tensor:
        source, grads, per_example = self._images(g)
        whole = symmetric(source.shape, grads.shape, self.geometry)
        if factors.dtype == torch.float64 or not whole:
            groups, kernel = self.geometry.groups, self.geometry.kernel
            size = math.prod((grads.shape[1], source.shape[1] // groups, *kernel))
            return materialized_sum(self, g, factors, size)
        scale = factors.repeat_interleave(per_example)
        scale = scale.view(-1, *[1] * (grads.dim() - 1))
        if source.numel() < grads.numel():
            source = source * scale
        else:
            grads = grads * scale
        return weight_gradient(source, grads, self.geometry, self.geometry.groups)


_MATERIALIZING = ("patches", "groups")


@functools.lru_cache(4096)
def _cheapest(
    source: Sizes, grads: Sizes, geometry: Geometry, among: tuple[str, ...] | None
) -> str:
    costs = _costs(source, grads, geometry)
    return min(among or costs, key=lambda name: costs[name])


def _costs(source: Sizes, grads: Sizes, geometry: Geometry) -> dict[str, float]:
    """What each method costs for images (N, C, …)."""
    n, c, o = source[0], source[1], grads[1]
    k, t, s = (math.prod(x) for x in (geometry.kernel, grads[2:], source[2:]))
    taps = c // geometry.groups * k
    work, materialized = 2 * n * o * taps * t * _FLOP, n * o * taps
    narrow = 4 if min(c // geometry.groups, o // geometry.groups) < 8 else 1
    seen = (2 if geometry.stride[-1] > 1 else 1) * _COPY * n * c * k * t  # apart: twice as slow
    costs = {
        "patches": work + seen * (k > 1) + _WRITE * materialized + _IMAGE * n + 8 * _CALL,
        "groups": 1.25 * narrow * work + _GROUPED * materialized + _IMAGE * n + 6 * _CALL,
        "patch grams": seen + 2 * n * t * t * (taps + o) * _FLOP + 3 * _IMAGE * n + 15 * _CALL,
        "shifted grams": math.inf,
    }
    if not symmetric(source, grads, geometry) or not materialized:
        costs["groups"] = math.inf
    if geometry.groups > 1:
        costs["patch grams"] = math.inf
    elif len(geometry.kernel) == 2 and geometry.stride == (1, 1):
        shifts = sum(geometry.kernel)
        adds, calls = n * shifts * t * t * _ADD, (15 + 6 * shifts) * _CALL
        costs["shifted grams"] = 2 * n * (s * s * c + t * t * o) * _FLOP + adds + 3 * _IMAGE * n
        costs["shifted grams"] += calls
    return costs


def _scratch(source: Sizes, grads: Sizes, geometry: Geometry, method: str) -> int:
    """How many numbers a method holds for an image beside its operands."""
    if method == "shifted grams":
        return 2 * math.prod(source[2:]) ** 2
    seen = source[1] * math.prod(geometry.kernel)
    return seen * (math.prod(grads[2:]) if method in ("patches", "patch grams") else grads[1])


class ChannelBias(GradientRule):
    """A bias per channel: gradient Σ g over everything but dimension `channel` of a row."""

    def __init__(self, channel: int = 1) -> None:
        super().__init__(None)
        self.channel = channel + 1

    def gradients(self, g: Tensor) -> Tensor:
        others = [d for d in range(1, g.dim()) if d != self.channel]
        return precise(g).sum(others)


def conv(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sizes = 1,
    padding: int | str | Sizes = 0,
    dilation: int | Sizes = 1,
    groups: int = 1,
) -> Iterator[tuple[Tensor, GradientRule]]:
    kernel = tuple(weight.shape[2:])
    if input.dim() != len(kernel) + 3 or input.shape[2] != groups * weight.shape[1]:
        return
    strides, dilations = sizes(stride, kernel), sizes(dilation, kernel)
    if padding == "same":
        before = tuple(d * (k - 1) // 2 for d, k in zip(dilations, kernel, strict=True))
    else:
        before = sizes(0 if isinstance(padding, str) else padding, kernel)
    yield weight, Conv(input, Geometry(kernel, strides, before, dilations, groups), bias)
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
) -> Iterator[tuple[Tensor, GradientRule]]:
    kernel = tuple(weight.shape[2:])
    if input.dim() != len(kernel) + 3 or input.shape[2] != weight.shape[0]:
        return
    strides, before, dilations = (sizes(o, kernel) for o in (stride, padding, dilation))
    geometry = Geometry(kernel, strides, before, dilations, groups)
    yield weight, Conv(input, geometry, swapped=True)
    if bias is not None:
        yield bias, ChannelBias()


def sizes(option: int | Sequence[int], kernel: Sizes) -> Sizes:
    """One number for each dimension of the kernel."""
    if not isinstance(option, Sequence):
        return (int(option),) * len(kernel)
    return tuple(option) * (len(kernel) if len(option) == 1 else 1)


norm_rule(torch.conv1d, torch.conv2d, torch.conv3d, F.conv1d, F.conv2d, F.conv3d)(conv)
norm_rule(
    torch.conv_transpose1d,
    torch.conv_transpose2d,
    torch.conv_transpose3d,
    F.conv_transpose1d,
    F.conv_transpose2d,
    F.conv_transpose3d,
)(_conv_transpose)
