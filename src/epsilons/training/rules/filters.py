"""Filter gradients of every image by compiled loops, in host memory.

Libraries sum filter gradients over the batch, or take every image for a group or a matrix of its
own and are slow on matrices so small. Here an image is held in the cache, padded such that a step
of the filter is a step in memory; then four outputs and three taps at a time share what they read.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import numpy as np
from numba import prange
from numpy.typing import NDArray
from torch import Tensor

from epsilons.training.compiled import reordered, share_out
from epsilons.training.rules.contractions import Geometry, Sizes

_OUTPUTS, _TAPS = 4, 3  # as many sums as there are registers
_LANES = 8  # places that a register holds
_TILE = 1152  # places at a time: their rows stay in the first cache

# Nanoseconds on one core: a product, the sums of a block across registers, a copy.
_PRODUCT, _BLOCK, _COPY = 1 / 42, 30.0, 0.5

_Floats = NDArray[Any]
_Whole = NDArray[np.int64]

# What stands where no gradients, or no squared norms, are asked for.
_NOT_FORMED, _NONE = np.empty((0, 0, 0, 0), np.float32), np.empty(0, np.float32)


def filter_gradients(source: Tensor, places: Tensor, geometry: Geometry) -> Tensor:
    """Every image's gradient, (N, o, c, rows, columns), c being the channels of a group."""
    groups, outputs, channels = geometry.groups, places.shape[1], source.shape[1]
    found = source.new_empty(len(source), outputs, channels // groups, *geometry.kernel)
    alone = len(source) * groups, outputs // groups, channels // groups
    _run(source, places, geometry, found.numpy().reshape(*alone, math.prod(geometry.kernel)), _NONE)
    return found


def filter_squares(source: Tensor, places: Tensor, geometry: Geometry) -> Tensor:
    """Every image's squared gradient norm, (N,), without keeping a gradient."""
    squares = source.new_empty(source.shape[0] * geometry.groups)
    _run(source, places, geometry, _NOT_FORMED, squares.numpy())
    return squares if geometry.groups == 1 else squares.view(len(source), geometry.groups).sum(1)


def filter_cost(source: Sizes, places: Sizes, geometry: Geometry) -> float:
    """Nanoseconds that an image takes on one core, for shapes (c, …) and (o, …)."""
    walk = _walk(source[1:], places[1:], geometry)
    channels, outputs = source[0] // geometry.groups, places[0] // geometry.groups
    blocks = -(-outputs // _OUTPUTS) * channels * -(-len(walk.taps) // _TAPS)
    sums = blocks * (_OUTPUTS * _TAPS * walk.run * _PRODUCT + -(-walk.run // _TILE) * _BLOCK)
    copied = channels * walk.down * walk.across * walk.length + outputs * walk.run
    return geometry.groups * (sums + _COPY * copied)


def _run(
    source: Tensor, places: Tensor, geometry: Geometry, found: _Floats, squares: _Floats
) -> None:
    images, its = (_by_group(t, geometry.groups) for t in (source, places))
    walk = _walk(source.shape[2:], places.shape[2:], geometry)
    share_out(len(images), _some, _at_once, images, its, walk, found, squares)


def _by_group(images: Tensor, groups: int) -> _Floats:
    """The images in host memory, a group of channels being like an image of its own."""
    array: _Floats = images.detach().contiguous().numpy()
    if groups == 1:
        return array
    return array.reshape(len(array) * groups, array.shape[1] // groups, *array.shape[2:])


class _Walk(NamedTuple):
    """How a padded channel lies in memory, and where in it each tap of the filter begins.

    A channel is split by the stride's phases, so that neighbouring places of a tap are neighbours.
    With stride 1 the zeros right of a line also stand left of the next one. The width is odd: else
    a lane of a register would see the same few columns of every line, and where neighbours differ
    in sign its sum would grow large before the lanes cancel.
    """

    down: int  # the strides
    across: int
    above: int  # the padding
    left: int
    lines: int
    width: int
    run: int  # what lies between the first and the last place, and zeros to fill registers
    length: int  # of a phase of a channel
    taps: _Whole


@functools.lru_cache(4096)
def _walk(size: Sizes, out: Sizes, geometry: Geometry) -> _Walk:
    kernel, stride, before, dilation, _ = geometry
    reach = [(k - 1) * d for k, d in zip(kernel, dilation, strict=True)]
    lines, width = (t + r // s for t, r, s in zip(out, reach, stride, strict=True))
    if stride[1] == 1:
        after = out[1] + reach[1] - before[1] - size[1]
        width = max(out[1], width - max(0, min(before[1], after)))
    width += 1 - width % 2
    run = _full(out[0] * width)
    length = _full(run + (reach[0] // stride[0]) * width + reach[1] // stride[1])
    taps = []
    for row, column in np.ndindex(*kernel):
        line, lower = divmod(row * dilation[0], stride[0])
        place, later = divmod(column * dilation[1], stride[1])
        taps.append((lower * stride[1] + later) * length + line * width + place)
    (down, across), (above, left) = stride, before
    return _Walk(down, across, above, left, lines, width, run, length, np.array(taps))


def _full(count: int) -> int:
    return -(-count // _LANES) * _LANES


@reordered(parallel=True)
def _at_once(
    threads: int, images: _Floats, places: _Floats, walk: _Walk, found: _Floats, squares: _Floats
) -> None:
    down, across, above, left, lines, width, run, length, taps = walk
    n = len(images)
    for t in prange(threads):
        # Numbers and arrays reach a thread, but no tuple of them.
        its = _Walk(down, across, above, left, lines, width, run, length, taps)
        _some(t * n // threads, (t + 1) * n // threads, images, places, its, found, squares)


@reordered()
def _some(
    first: int,
    last: int,
    images: _Floats,
    places: _Floats,
    walk: _Walk,
    found: _Floats,
    squares: _Floats,
) -> None:
    """Gradients go to `found`, squared norms to `squares`: to neither if it is empty."""
    channels, outputs, taps = images.shape[1], places.shape[1], len(walk.taps)
    begins = np.full(taps + -taps % _TAPS, walk.taps[-1])  # a last block is filled up
    begins[:taps] = walk.taps
    x = np.zeros((channels, walk.down * walk.across * walk.length), images.dtype)
    g = np.zeros((outputs + -outputs % _OUTPUTS, walk.run), images.dtype)
    sums = np.empty((len(g), channels, len(begins)), images.dtype)
    for i in range(first, last):
        _spread(images[i], walk, x)
        _spread_places(places[i], walk, g)
        sums[:] = 0
        for start in range(0, walk.run, _TILE):
            _contract(x, g, start, min(start + _TILE, walk.run), begins, sums)
        sums[:, :, taps:] = 0
        if len(squares) > 0:
            squares[i] = _square(sums[:outputs].reshape(outputs, -1))
        if len(found) > 0:
            found[i] = sums[:outputs, :, :taps]


@reordered()
def _spread(image: _Floats, walk: _Walk, x: _Floats) -> None:
    """Write an image's channels where the taps look for them; the padding already is zero."""
    channels, height, wide = image.shape
    for above in range(walk.down):
        for left in range(walk.across):
            shift = left - walk.left
            begin = (above * walk.across + left) * walk.length
            first = max(0, -(shift // walk.across))
            last = min(walk.width, (wide - 1 - shift) // walk.across + 1)
            for line in range(walk.lines):
                row = line * walk.down + above - walk.above
                if 0 <= row < height:
                    for c in range(channels):
                        target = x[c, begin + line * walk.width + first :]
                        seen = image[c, row, first * walk.across + shift :]
                        if walk.across == 1:  # the loop that compilers do well
                            for i in range(last - first):
                                target[i] = seen[i]
                        else:
                            for i in range(last - first):
                                target[i] = seen[i * walk.across]


@reordered()
def _spread_places(places: _Floats, walk: _Walk, g: _Floats) -> None:
    """The same for what came back to the places."""
    outputs, rows, columns = places.shape
    for o in range(outputs):
        for row in range(rows):
            target, seen = g[o, row * walk.width :], places[o, row]
            for column in range(columns):
                target[column] = seen[column]


@reordered()
def _contract(x: _Floats, g: _Floats, first: int, last: int, taps: _Whole, sums: _Floats) -> None:
    """Add Σ_p g_op · x_c,p+tap over the places p from first to last, for all o, c and taps."""
    zero = x.dtype.type(0)
    for o in range(0, len(g), _OUTPUTS):
        g0, g1, g2, g3 = (
            g[o, first:last],
            g[o + 1, first:last],
            g[o + 2, first:last],
            g[o + 3, first:last],
        )
        for c in range(len(x)):
            for tap in range(0, len(taps), _TAPS):
                a = x[c, first + taps[tap] :]
                b = x[c, first + taps[tap + 1] :]
                d = x[c, first + taps[tap + 2] :]
                a0 = b0 = d0 = a1 = b1 = d1 = a2 = b2 = d2 = a3 = b3 = d3 = zero
                for p in range(last - first):
                    a0 += g0[p] * a[p]
                    b0 += g0[p] * b[p]
                    d0 += g0[p] * d[p]
                    a1 += g1[p] * a[p]
                    b1 += g1[p] * b[p]
                    d1 += g1[p] * d[p]
                    a2 += g2[p] * a[p]
                    b2 += g2[p] * b[p]
                    d2 += g2[p] * d[p]
                    a3 += g3[p] * a[p]
                    b3 += g3[p] * b[p]
                    d3 += g3[p] * d[p]
                _add(sums[o, c, tap:], a0, b0, d0)
                _add(sums[o + 1, c, tap:], a1, b1, d1)
                _add(sums[o + 2, c, tap:], a2, b2, d2)
                _add(sums[o + 3, c, tap:], a3, b3, d3)


@reordered()
def _add(sums: _Floats, a: Any, b: Any, d: Any) -> None:
    sums[0] += a
    sums[1] += b
    sums[2] += d


@reordered()
def _square(values: _Floats) -> float:
    """Σ values², row by row: one long sum in single precision would come out too small."""
    total = 0.0
    for row in range(len(values)):
        part = values.dtype.type(0)
        for i in range(values.shape[1]):
            part += values[row, i] * values[row, i]
        total += part
    return total
