"""Ways to contract an image's patches with the output gradients at their pixels.

A materialized gradient is Σ_t g_t p_tᵀ over the output pixels t, one for each image; Gram matrices
hold the products of patches, from which ghost norms follow.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from epsilons.gradients.clip_factors import widest_dtype

Sizes = tuple[int, ...]

_LONG, _PART = 128, 64  # up to so many numbers in a chain of sums, if there are more
_GRAM_PART = 128  # errs by less than 4e-6, even if all of it is rounded to one side
CANCELLATION = 0.05  # the least share of Σ_t‖a_t‖²‖g_t‖² for which this is good enough
_UNDERFLOW = 1e-33  # more than what float32 loses of a square, below its smallest number


class Geometry(NamedTuple):
    """How filters walk over the input; `before` is the padding in front of each dimension."""

    kernel: Sizes
    stride: Sizes
    before: Sizes
    dilation: Sizes
    groups: int


def symmetric(source: Sequence[int], grads: Sequence[int], geometry: Geometry) -> bool:
    """Whether padding is the same on both sides, as torch's own backward assumes; from shapes."""
    kernel, stride, before, dilation, _ = geometry
    return all(
        (size + 2 * p - d * (k - 1) - 1) // s + 1 == t
        for size, p, d, k, s, t in zip(
            source[-len(kernel) :],
            before,
            dilation,
            kernel,
            stride,
            grads[-len(kernel) :],
            strict=True,
        )
    )


def summed_products(x: Tensor, y: Tensor) -> Tensor:
    """Σ_t x_t y_tᵀ, (N, m, n) for x (N, m, T) and y (N, n, T); long sums from parts.

    Libraries sum small matrices in one chain, which in float32 loses digits: 1e-3 of a
    patch of 200,000 numbers, and its norm came out too small.
    """
    positions = x.shape[2]
    return _in_parts(x, y, max(1, positions) if positions <= _LONG else _part(positions))


def gram(rows: Tensor) -> Tensor:
    """Products of all pairs of rows, (N, T, T) for rows (N, T, d)."""
    return _in_parts(rows, rows, max(_GRAM_PART, _part(rows.shape[2])))


def ghost_norms(data: Tensor, grads: Tensor) -> tuple[Tensor, Tensor]:
    """‖Σ_t g_t a_tᵀ‖² = Σ_st ⟨a_s, a_t⟩⟨g_s, g_t⟩ from two `gram`s, (N,), and where it cancels.

    Rounded up by what products may lose that float32 can't hold. `grads` is overwritten.
    """
    wide = widest_dtype(data.device)
    traces = sum(matrix.diagonal(dim1=1, dim2=2).sum(1, dtype=wide) for matrix in (data, grads))
    products = grads.mul_(data)
    squares = products.sum((1, 2)).to(wide) + _UNDERFLOW * data.shape[1] * traces
    return squares, squares < CANCELLATION * products.diagonal(dim1=1, dim2=2).sum(1)


def outer_norms(a: Tensor, g: Tensor) -> Tensor:
    """‖g aᵀ‖² = ‖a‖²‖g‖² from the squared norms of rows a and g, (N,), rounded up likewise."""
    wide = widest_dtype(a.device)
    return (a.to(wide) + _UNDERFLOW) * (g.to(wide) + _UNDERFLOW)


def _part(numbers: int) -> int:
    """How many go into one chain of sums: no more than there are chains, if there are many."""
    return max(_PART, math.isqrt(numbers))


def _in_parts(x: Tensor, y: Tensor, size: int) -> Tensor:
    positions = x.shape[2]
    total = torch.bmm(x[..., :size], y[..., :size].mT)
    for start in range(size, positions, size):
        part = slice(start, start + size)
        total += torch.bmm(x[..., part], y[..., part].mT)  # apart: not in one chain with the total
    return total


def weight_gradient(source: Tensor, grads: Tensor, geometry: Geometry, groups: int) -> Tensor:
    kernel, stride, before, dilation, _ = geometry
    shape = (grads.shape[1], source.shape[1] // groups, *kernel)
    weight = source.new_empty(()).expand(shape)  # asked for its shape only
    found: Tensor = torch.ops.aten.convolution_backward(
        grads,
        source,
        weight,
        None,
        stride,
        before,
        dilation,
        False,
        [0] * len(kernel),
        groups,
        [False, True, False],
    )[1]
    return found


def by_groups(source: Tensor, grads: Tensor, geometry: Geometry) -> Tensor:
    """Materialized gradients, from one convolution that has every image as a group of its own."""
    n = len(source)
    source = source.reshape(1, -1, *source.shape[2:])
    grads = grads.reshape(1, -1, *grads.shape[2:])
    return weight_gradient(source, grads, geometry, n * geometry.groups).view(
        n, grads.shape[1] // n, -1, *geometry.kernel
    )


def by_patches(source: Tensor, grads: Tensor, geometry: Geometry) -> Tensor:
    """Materialized gradients, from patches laid out in memory."""
    n, groups, o = len(source), geometry.groups, grads.shape[1]
    taps, t = source.shape[1] // groups * math.prod(geometry.kernel), math.prod(grads.shape[2:])
    p = _patches(source, grads.shape[2:], geometry).reshape(n * groups, taps, t)
    q = grads.reshape(n * groups, o // groups, t)
    return summed_products(q, p).view(n, o, source.shape[1] // groups, *geometry.kernel)


def _patches(source: Tensor, pixels: Sequence[int], geometry: Geometry) -> Tensor:
    """(N, C·k, T): what the filters see at every output pixel."""
    kernel, stride, before, dilation, _ = geometry
    padding: list[int] = []
    for d in reversed(range(len(kernel))):
        reach = (pixels[d] - 1) * stride[d] + (kernel[d] - 1) * dilation[d] + 1
        padding += [before[d], max(0, reach - before[d] - source.shape[2 + d])]
    padded = F.pad(source, padding)
    n, c, *steps = padded.stride()
    window = padded.as_strided(
        (len(padded), padded.shape[1], *kernel, *pixels),
        (
            n,
            c,
            *(step * d for step, d in zip(steps, dilation, strict=True)),
            *(step * s for step, s in zip(steps, stride, strict=True)),
        ),
        padded.storage_offset(),
    )
    return window.reshape(len(padded), padded.shape[1] * math.prod(kernel), math.prod(pixels))


def patch_gram(source: Tensor, grads: Tensor, geometry: Geometry) -> Tensor:
    """(N, T, T): products of patches."""
    return gram(_patches(source, grads.shape[2:], geometry).mT)


def shifted_gram(source: Tensor, grads: Tensor, geometry: Geometry) -> Tensor:
    """The same from products of pixels: patches overlap, so their products share them.

    ⟨p_t, p_u⟩ = Σ_shift ⟨a_{t+shift}, a_{u+shift}⟩, one dimension of the shift after the other.
    """
    (h, w), (rows, columns) = source.shape[2:], grads.shape[2:]
    pixels = gram(source.flatten(2).mT).view(-1, h, w, h, w)
    patches = _shifted(_shifted(pixels, 2, columns, 1, geometry), 1, rows, 0, geometry)
    return patches.view(len(patches), rows * columns, rows * columns)


def _shifted(pairs: Tensor, dim: int, pixels: int, axis: int, geometry: Geometry) -> Tensor:
    """Σ_shift of the diagonal shifts along dimensions `dim` and `dim + 2`; beyond the edge is 0."""
    size = pairs.shape[dim]
    shape = list(pairs.shape)
    shape[dim] = shape[dim + 2] = pixels
    total = pairs.new_zeros(shape)
    for tap in range(geometry.kernel[axis]):
        offset = tap * geometry.dilation[axis] - geometry.before[axis]
        first, last = max(0, -offset), min(pixels, size - offset)
        if first < last:
            length = last - first
            part = pairs.narrow(dim, first + offset, length).narrow(dim + 2, first + offset, length)
            total.narrow(dim, first, length).narrow(dim + 2, first, length).add_(part)
    return total
