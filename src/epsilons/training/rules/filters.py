"""Filter gradients of every image by compiled loops, in host memory.

Libraries sum filter gradients over the batch, or take every image for a group or a matrix of its
own and are slow on matrices so small. Here an image is held in the cache with its channels last,
where what a filter sees is a few vectors in a row: sums of some outputs by up to three vectors stay
in registers while all places are gone through.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray
from torch import Tensor

from epsilons.training.compiled import reordered, scratch
from epsilons.training.lanes import address
from epsilons.training.rules import tiles
from epsilons.training.rules.contractions import Geometry, Sizes
from epsilons.training.rules.squares import square
from epsilons.training.rules.tiles import FLOATS, LANES, SIDE, WHOLES, WIDE, turn
from epsilons.training.threads import go_through, share_out

_OUTPUTS, _VECTORS = 8 if WIDE else 4, 3  # of the largest tile: as many sums as registers hold
_PLACES = 128  # in one chain of sums; so many chains are added in single precision,
_STRETCH = 32 * _PLACES  # and what they come to in double precision
_TOGETHER = 2**16  # numbers of several lines put together, at most: they stay in the cache

# Nanoseconds on one core: a product, what comes with a tile, a copy.
_PRODUCT, _TILE, _COPY = 1 / 45, 12.0, 0.2

_Floats = NDArray[Any]
_Whole = NDArray[np.int64]
_intrinsic: Any = intrinsic  # numba itself gives the first argument

_NOT_FORMED = torch.empty(
    0, 0, 0, dtype=torch.float32, device="cpu"
)  # what stands where no gradients are asked for


def filter_gradients(
    source: Tensor, places: Tensor, geometry: Geometry
) -> tuple[Tensor, Tensor, Tensor]:
    """Every image's gradient, (N, o, c, rows, columns), squared norms (N,), and Σ places (N, o).

    c is the channels of a group; in memory they come last.
    """
    groups, outputs, channels = geometry.groups, places.shape[1], source.shape[1] // geometry.groups
    found = source.new_empty(len(source), outputs, *geometry.kernel, channels)
    alone = len(source) * groups, outputs // groups, channels * math.prod(geometry.kernel)
    squares, totals = _run(source, places, geometry, found.view(alone))
    return found.permute(0, 1, 4, 2, 3), squares, totals


def filter_squares(source: Tensor, places: Tensor, geometry: Geometry) -> tuple[Tensor, Tensor]:
    """Every image's squared gradient norm, (N,), and Σ places (N, o); no gradient is kept."""
    return _run(source, places, geometry, _NOT_FORMED)


def filter_cost(source: Sizes, places: Sizes, geometry: Geometry) -> float:
    """Nanoseconds that an image takes on one core, for shapes (c, …) and (o, …)."""
    channels, outputs = source[0] // geometry.groups, places[0] // geometry.groups
    count, vectors = math.prod(places[1:]), len(_seen(channels, places[1:], geometry))
    rows = -(-outputs // _OUTPUTS)
    products = rows * _OUTPUTS * vectors * LANES * count
    tiles = rows * -(-vectors // _VECTORS) * -(-count // _PLACES)
    copied = channels * math.prod(source[1:]) + outputs * count
    return geometry.groups * (products * _PRODUCT + tiles * _TILE + _COPY * copied)


def _run(
    source: Tensor, places: Tensor, geometry: Geometry, found: Tensor
) -> tuple[Tensor, Tensor]:
    groups = geometry.groups
    images, its = (_by_group(t, groups) for t in (source, places))
    walk = _walk(images.shape[1], places.shape[2:], geometry)
    squares, totals = source.new_empty(len(images)), places.new_empty(its.shape[:2])
    share_out(len(images), _some, _at_once, images, its, walk, found, squares, totals)
    if groups == 1:
        return squares, totals
    return squares.view(-1, groups).sum(1), totals.view(places.shape[:2])


def _by_group(images: Tensor, groups: int) -> Tensor:
    """A group of channels being like an image of its own."""
    n, channels, *size = images.shape
    return images if groups == 1 else images.reshape(n * groups, channels // groups, *size)


class _Walk(NamedTuple):
    """How a padded image lies in memory, channels last, and where a filter looks in it.

    Where several lines of a filter fit into a vector (`lines_together` > 1), what it sees of them
    is put together first, for every column that it begins at and every line that it may.
    """

    above: int  # the padding
    left: int
    lines: int
    width: int
    pitch: int  # from one pixel to the next
    begins: _Whole  # where each place begins
    vectors: _Whole  # where each vector of a filter begins, from there
    filled: _Whole  # how many of its lanes are of the filter
    lines_together: int
    run: int  # numbers of each of them
    apart: int  # lines from one of them to the next
    down: int  # lines from one that a vector may begin at to the next, and how many there are
    number: int
    across: int  # numbers from one column that a filter begins at to the next, likewise
    columns: int


@functools.lru_cache(256)
def _walk(channels: int, out: Sizes, geometry: Geometry) -> _Walk:
    (tall, wide), (down, across), (above, left), (dy, dx), _ = geometry
    lines = (out[0] - 1) * down + (tall - 1) * dy + 1
    width = (out[1] - 1) * across + (wide - 1) * dx + 1
    together, run = _lines_together(channels, out, geometry), wide * channels
    pitch = _pitch(channels)
    seen = np.array(_seen(channels, out, geometry))
    steps, filled = seen[:, :3], seen[:, 3].copy()
    gap = math.gcd(down, together * dy)
    if together > 1:
        number = ((out[0] - 1) * down + steps[-1, 0] * dy) // gap + 1
        rows, columns = (LANES * np.arange(size) for size in out)
        begins = rows[:, None] * (down // gap * out[1]) + columns
        vectors = LANES * (steps[:, 0] * dy // gap) * out[1]
    else:
        number = 0
        rows, columns = (pitch * np.arange(size) for size in out)
        begins = rows[:, None] * (down * width) + columns * across
        vectors = (steps[:, 0] * dy * width + steps[:, 1] * dx) * pitch + steps[:, 2]
    return _Walk(
        above, left, lines, width, pitch, begins.reshape(-1), vectors, filled,
        together, run, dy, gap, int(number), across * pitch, out[1],
    )  # fmt: skip


def _seen(channels: int, out: Sizes, geometry: Geometry) -> list[tuple[int, int, int, int]]:
    """The vectors of a filter: line, tap and number that each begins with, and how many it has.

    A tap is a run of numbers in an image with its channels last; few channels are put together for
    all taps of a line, and for several lines where they fit.
    """
    tall, wide = geometry.kernel
    together = _lines_together(channels, out, geometry)
    if together > 1:
        lines = range(0, tall, together)
        return [(line, 0, 0, min(together, tall - line) * wide * channels) for line in lines]
    joined = channels % LANES > 0 and geometry.dilation[1] == 1
    taps, length = (1, wide * channels) if joined else (wide, channels)
    return [
        (line, tap, lane, min(LANES, length - lane))
        for line in range(tall)
        for tap in range(taps)
        for lane in range(0, length, LANES)
    ]


def _lines_together(channels: int, out: Sizes, geometry: Geometry) -> int:
    """How many lines of a filter go into one vector; 1 if what is put together would be large."""
    (tall, wide), (down, _), _, (dy, dx), _ = geometry
    size = LANES * ((out[0] - 1) * down + tall * dy) * out[1]
    if dx > 1 or channels < 1 or size > _TOGETHER:
        return 1
    return max(1, min(tall, LANES // (wide * channels)))


@reordered()
def _pitch(numbers: int) -> int:
    """How far apart pixels of so many numbers lie: a power of two would put all of them into the
    same few lines of the cache."""
    return numbers + LANES if numbers % (4 * LANES) == 0 else numbers


@reordered()
def _at_once(threads: int, count: int, *operands: Any) -> Any:
    return go_through(_some, threads, count, operands)


@reordered()
def _some(
    first: int,
    last: int,
    images: _Floats,
    places: _Floats,
    walk: _Walk,
    found: _Floats,
    squares: _Floats,
    totals: _Floats,
) -> None:
    """Gradients go to `found`, unless it is empty."""
    outputs, count = places.shape[1], len(walk.begins)
    padded = outputs + -outputs % _OUTPUTS
    width = LANES * len(walk.vectors)
    image = scratch(walk.lines * walk.width * walk.pitch + LANES, np.float32)
    x = image
    if walk.lines_together > 1:
        x = scratch(LANES * (walk.number * walk.columns + 1), np.float32)
    pitch = _pitch(padded)
    g = scratch(count * pitch, np.float32)
    whole = outputs % _OUTPUTS == 0 and width == found.shape[2]
    sums = scratch(0 if whole else padded * width, np.float32)
    for i in range(first, last):
        _channels_last(images[i], walk.above, walk.left, walk.lines, walk.width, walk.pitch, image)
        if walk.lines_together > 1:
            _put_together(image, walk, x)
        _channels_last(places[i].reshape(outputs, 1, count), 0, 0, 1, count, pitch, g)
        _add_up(places[i].reshape(outputs, count), totals[i])
        target = found[i].reshape(-1) if whole else sums
        if count <= _STRETCH:
            _contract(x, g, pitch, walk.begins, 0, count, walk.vectors, target)
        else:
            _contract_at_length(x, g, pitch, walk.begins, walk.vectors, target)
        rows = target.reshape(-1, width)[:outputs]
        _clear(rows, walk.filled)
        squares[i] = square(rows.reshape(-1))
        if not whole and len(found) > 0:
            _gather(rows, walk.filled, found[i])


@reordered()
def _channels_last(
    image: _Floats, above: int, left: int, lines: int, width: int, pitch: int, x: _Floats
) -> None:
    """Write an image where it is looked for, its channels side by side; padding stays zero."""
    channels, height, wide = image.shape
    flat, first = image.reshape(-1), max(0, left)
    last = max(first, min(width, wide + left))
    together = channels - channels % SIDE if last - first >= SIDE else 0
    for line in range(max(0, above), min(lines, height + above)):
        seen, target = (line - above) * wide - left, line * width * pitch
        if pitch == 1:  # which a compiler doesn't see by itself
            x[target + first : target + last] = flat[seen + first : seen + last]
            continue
        for c in range(0, together, SIDE):
            for column in range(first, last, SIDE):
                at = min(column, last - SIDE)
                start = c * height * wide + seen + at
                turn(flat, start, height * wide, x, target + at * pitch + c, pitch)
        for c in range(together, channels):
            for column in range(first, last):
                x[target + column * pitch + c] = flat[c * height * wide + seen + column]


@reordered()
def _put_together(image: _Floats, walk: _Walk, x: _Floats) -> None:
    """What a filter sees of some lines side by side, by line and column that it begins at.

    A whole vector is copied of each line. What is too much is overwritten by the next one, or lies
    in lanes that are not of the filter and are cleared in the end.
    """
    pitch = walk.width * walk.pitch
    for first in range(walk.number):
        for column in range(walk.columns):
            to = LANES * (first * walk.columns + column)
            for part in range(walk.lines_together):
                line = first * walk.down + part * walk.apart
                if line < walk.lines:
                    tiles.copy(image, line * pitch + column * walk.across, x, to + part * walk.run)


@reordered()
def _add_up(places: _Floats, total: _Floats) -> None:
    """Σ_t of every row, some places at a time."""
    for o in range(len(places)):
        row, whole = places[o], 0.0
        for start in range(0, len(row), LANES * _PLACES):
            some = row[start : start + LANES * _PLACES]
            part = places.dtype.type(0)
            for t in range(len(some)):
                part += some[t]
            whole += part
        total[o] = whole


@reordered()
def _contract_at_length(
    x: _Floats, g: _Floats, pitch: int, begins: _Whole, steps: _Whole, sums: _Floats
) -> None:
    total = np.zeros(len(sums))
    for first in range(0, len(begins), _STRETCH):
        _contract(x, g, pitch, begins, first, min(first + _STRETCH, len(begins)), steps, sums)
        total += sums
    sums[:] = total


@reordered()
def _contract(
    x: _Floats,
    g: _Floats,
    pitch: int,
    begins: _Whole,
    first: int,
    last: int,
    steps: _Whole,
    sums: _Floats,
) -> None:
    """Σ_t g_ot · x_(t + step) over places t from first to last, for all outputs o and vectors."""
    width, number = LANES * len(steps), len(steps)
    for start in range(first, last, _PLACES):
        some = min(_PLACES, last - start)
        v = 0
        while v < number:
            size = _tile_size(number - v)
            for o in range(0, len(sums) // width, _OUTPUTS):
                at, to = start * pitch + o, o * width + v * LANES
                fresh = start == first
                if size == 3:
                    _three(g, at, pitch, x, begins, start, some, steps, v, fresh, sums, to, width)
                elif size == 2:
                    _two(g, at, pitch, x, begins, start, some, steps, v, fresh, sums, to, width)
                else:
                    _one(g, at, pitch, x, begins, start, some, steps, v, fresh, sums, to, width)
            v += size


@reordered()
def _tile_size(vectors: int) -> int:
    """How many of the vectors that are left go together: three, but rather two and two of four."""
    return 2 if vectors == 4 else min(vectors, _VECTORS)


def _tile(vectors: int) -> Any:
    """A tile of so many vectors, as a function for compiled loops."""

    @_intrinsic
    def tile(
        typing: Any,
        left: Any,
        at: Any,
        pitch: Any,
        right: Any,
        begins: Any,
        first: Any,
        count: Any,
        steps: Any,
        v: Any,
        fresh: Any,
        sums: Any,
        to: Any,
        stride: Any,
    ) -> Any:
        """sums[to + r·stride + k·lanes :] = Σ_t left[at + t·pitch + r] · right[begins[t] + step :].

        By vectors, step = steps[v + k], over `count` places t from `first`; added to what is there
        unless it is `fresh`.
        """

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            left, at, pitch, right, begins, first, count, steps, v, fresh, sums, to, stride = args
            g = address(context, builder, FLOATS, left, at)
            step = address(context, builder, WHOLES, steps, v)
            x = [
                address(context, builder, FLOATS, right, builder.load(place))
                for place in (builder.gep(step, [tiles.whole(k)]) for k in range(vectors))
            ]
            place = address(context, builder, WHOLES, begins, first)
            out = address(context, builder, FLOATS, sums, to)

            def number(t: Any, r: int) -> Any:
                return tiles.spread(builder, builder.load(tiles.moved(builder, g, t, pitch, r)))

            def seen(t: Any) -> list[Any]:
                begin = builder.load(builder.gep(place, [t]))
                return [tiles.load(builder, builder.gep(start, [begin])) for start in x]

            totals = tiles.accumulated(builder, count, _OUTPUTS, vectors, number, seen)
            for r, row in enumerate(totals):
                for k, value in enumerate(row):
                    where = tiles.moved(builder, out, tiles.whole(r), stride, k * LANES)
                    before = builder.select(fresh, tiles.ZERO, tiles.load(builder, where))
                    tiles.store(builder, builder.fadd(before, value), where)
            return context.get_dummy_value()

        n = types.int64
        signature = types.void(
            FLOATS, n, n, FLOATS, WHOLES, n, n, WHOLES, n, types.boolean, FLOATS, n, n
        )
        return signature, generate

    return tile


_one, _two, _three = _tile(1), _tile(2), _tile(3)


@reordered()
def _clear(rows: _Floats, filled: _Whole) -> None:
    """Set to zero what is no part of a filter."""
    for v in range(len(filled)):
        if filled[v] < LANES:
            rows[:, LANES * v + filled[v] : LANES * (v + 1)] = 0


@reordered()
def _gather(rows: _Floats, filled: _Whole, found: _Floats) -> None:
    """Put what is of the filters side by side."""
    for o in range(len(rows)):
        at = 0
        for v in range(len(filled)):
            for lane in range(filled[v]):
                found[o, at] = rows[o, LANES * v + lane]
                at += 1
