"""Attention over short sequences by compiled loops, in host memory.

It has no weights, so that torch's own kernels would do. But these are made for long sequences and
take twice as long: here a head of an example stays in the cache from its first product to its last.

    P = softmax(s·QKᵀ),   O = PV                                  with s the scale
    ∂V = Pᵀ∂O,   ∂P = ∂O Vᵀ,   ∂S = P∘(∂P − rows of ⟨P, ∂P⟩),   ∂Q = s·∂S K,   ∂K = s·∂Sᵀ Q
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray
from torch import Tensor

from epsilons.training.compiled import addressable, reordered, scratch, singles_at
from epsilons.training.lanes import SINGLES, Lanes, address, folded, loaded, spread
from epsilons.training.rules.exponential import exponentials, largest
from epsilons.training.rules.pieces import room_like
from epsilons.training.rules.tiles import BROAD, LANES, SIDE, TALL, copy, matrix, turn
from epsilons.training.threads import go_through, share_out

MOST = 128  # places and numbers: one chain of sums in single precision errs by less than 1e-5

_Floats = NDArray[Any]
_Whole = NDArray[np.int64]
_Number = float | np.floating[Any]
_intrinsic: Any = intrinsic  # numba itself gives the first argument


def fits(*operands: Tensor) -> bool:
    """Whether these are heads (B, H, T, d) of short sequences that the loops take."""
    return all(
        t.dim() == 4 and min(t.shape) > 0 and max(t.shape[2:]) <= MOST and addressable(t)
        for t in operands
    )  # fmt: skip


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """PV (B, T, H, e), and log Σ_u exp(s·⟨q_t, k_u⟩) (B, H, T).

    q: (B, H, T, d), k: (B, H, U, d), v: (B, H, U, e). `causal`: place t sees places u ≤ t only.
    """
    batch, heads, places, _ = q.shape
    out, sums = _room_for(v, places), q.new_empty(batch, heads, places)
    given = [_rows(t) for t in (q, k, v)]  # by name: the loops have only their addresses
    table, sizes = _table(*given, out.transpose(1, 2)), _sizes(q, k, v)
    share_out(batch * heads, _some, _at_once, table, sizes, scale, causal, sums)
    return out, sums


def attention_back(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, sums: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """∂Q, ∂K and ∂V (B, H, T, d) from ∂O = g (B, T, H, e), with the sums of `attention`."""
    found = room_like((q, k, v))
    if found is None or found[0].stride(3) != 1:
        found = [_room_for(t, t.shape[2]).transpose(1, 2) for t in (q, k, v)]
    given = [_rows(t) for t in (g.transpose(1, 2), q, k, v)]
    table, sizes = _table(*given, *found), _sizes(q, k, v)
    count = q.shape[0] * q.shape[1]
    share_out(count, _some_back, _back_at_once, table, sizes, scale, causal, sums)
    return found[0], found[1], found[2]


def _rows(heads: Tensor) -> Tensor:
    """The same with the numbers of a place side by side."""
    return heads.resolve_neg() if heads.stride(3) == 1 else heads.contiguous()


def _room_for(like: Tensor, places: int) -> Tensor:
    """Room for heads that lie side by side in memory, place by place: (B, T, H, d)."""
    batch, heads, _, width = like.shape
    return like.new_empty(batch, places, heads, width)


def _table(*heads: Tensor) -> _Whole:
    """Where tensors (B, H, T, d) lie, and how far apart examples, heads and places are in each."""
    if not all(addressable(t) for t in heads):
        raise TypeError("attention: what came back is of another kind, or in another place")
    return np.array([(t.data_ptr(), *t.stride()[:3]) for t in heads], np.int64)


def _sizes(q: Tensor, k: Tensor, v: Tensor) -> _Whole:
    return np.array([q.shape[1], q.shape[2], k.shape[2], q.shape[3], v.shape[3]], np.int64)


@reordered()
def _at_once(threads: int, count: int, *operands: Any) -> Any:
    return go_through(_some, threads, count, operands)


@reordered()
def _back_at_once(threads: int, count: int, *operands: Any) -> Any:
    return go_through(_some_back, threads, count, operands)


@reordered()
def _some(
    first: int,
    last: int,
    table: _Whole,
    sizes: _Whole,
    scale: float,
    causal: bool,
    sums: _Floats,
) -> None:
    heads, places, others, width, depth = sizes
    across = _whole(others)
    shown = across - LANES
    rows, weights = _room(places, width), _room(places, others)
    right, result = _panels(max(width, others), max(others, depth)), _room(places, depth)
    logs, shares = sums.reshape(-1, places), np.empty(places, np.float32)
    seen = weights[: places * across].reshape(places, across)[:, :shown]
    for i in range(first, last):
        _take(table[0], i, heads, places, width, np.float32(scale), rows)
        _turn(table[1], i, heads, others, width, right)
        _multiply(rows, 1, _whole(width), places, right, width, others, weights, across)
        _hide(seen, others, causal)
        for t in range(places):
            logs[i, t] = largest(weights, t * across, shown)
            shares[t] = exponentials(weights, t * across, shown, logs[i, t])
        _pack(table[2], i, heads, others, depth, right)
        _multiply(weights, 1, across, places, right, others, depth, result, _whole(depth))
        for t in range(places):
            logs[i, t] += math.log(shares[t])
            shares[t] = 1 / shares[t]
        _give(table[3], i, heads, places, depth, result, shares)


@reordered()
def _some_back(
    first: int,
    last: int,
    table: _Whole,
    sizes: _Whole,
    scale: float,
    causal: bool,
    sums: _Floats,
) -> None:
    heads, places, others, width, depth = sizes
    across, wide, deep = _whole(others), _whole(width), _whole(depth)
    shown = across - LANES
    most = max(places, others)
    rows, given = _room(places, width), _room(places, depth)
    weights, slopes = _room(places, others), _room(places, others)
    result = _room(most, max(width, depth))
    right = _panels(max(most, width, depth), max(most, width, depth))
    logs, factor, one = sums.reshape(-1, places), np.float32(scale), np.float32(1)
    ones = np.ones(most, np.float32)
    seen = weights[: places * across].reshape(places, across)[:, :shown]
    for i in range(first, last):
        _take(table[0], i, heads, places, depth, one, given)
        _take(table[1], i, heads, places, width, factor, rows)
        _turn(table[2], i, heads, others, width, right)
        _multiply(rows, 1, wide, places, right, width, others, weights, across)
        _hide(seen, others, causal)
        _turn(table[3], i, heads, others, depth, right)
        _multiply(given, 1, deep, places, right, depth, others, slopes, across)
        for t in range(places):
            exponentials(weights, t * across, shown, logs[i, t])
            _slopes(weights, slopes, t * across, shown, factor)
        _pack(table[2], i, heads, others, width, right)
        _multiply(slopes, 1, across, places, right, others, width, result, wide)
        _give(table[4], i, heads, places, width, result, ones)
        _pack(table[1], i, heads, places, width, right)
        _multiply(slopes, across, 1, others, right, places, width, result, wide)
        _give(table[5], i, heads, others, width, result, ones)
        _pack(table[0], i, heads, places, depth, right)
        _multiply(weights, across, 1, others, right, places, depth, result, deep)
        _give(table[6], i, heads, others, depth, result, ones)


@reordered()
def _tall(rows: int) -> int:
    """So many rows and more, for whole tiles."""
    return rows + -rows % TALL


@reordered()
def _whole(columns: int) -> int:
    """So many columns and more, for whole tiles; no power of two, for the cache's sake."""
    return columns + -columns % BROAD + LANES


@reordered()
def _room(rows: int, columns: int) -> _Floats:
    return scratch(_tall(rows) * _whole(columns), np.float32)


@reordered()
def _panels(rows: int, columns: int) -> _Floats:
    return scratch(rows * (columns + -columns % BROAD), np.float32)


@reordered()
def _head(place: _Whole, i: int, heads: int, rows: int, width: int) -> tuple[_Floats, int]:
    """The memory of head i from its first number on, and how far apart its rows are."""
    start, example, head, stride = place
    address = start + 4 * (i // heads * example + i % heads * head)
    return singles_at(address, (rows - 1) * stride + width), stride


@reordered()
def _take(
    place: _Whole, i: int, heads: int, rows: int, width: int, scale: _Number, to: _Floats
) -> None:
    """Copy the rows of a head times a scale, apart as `_whole` says."""
    x, stride = _head(place, i, heads, rows, width)
    pitch = _whole(width)
    for t in range(rows):
        ours, theirs = to[t * pitch : t * pitch + width], x[t * stride : t * stride + width]
        for j in range(width):
            ours[j] = scale * theirs[j]


@reordered()
def _give(
    place: _Whole, i: int, heads: int, rows: int, width: int, found: _Floats, scales: _Floats
) -> None:
    """The other way round, with a scale for each row."""
    x, stride = _head(place, i, heads, rows, width)
    pitch = _whole(width)
    for t in range(rows):
        ours, theirs = found[t * pitch : t * pitch + width], x[t * stride : t * stride + width]
        for j in range(width):
            theirs[j] = scales[t] * ours[j]


@reordered()
def _pack(place: _Whole, i: int, heads: int, rows: int, width: int, panels: _Floats) -> None:
    """Panels of columns, row by row; zeros where a panel has more than there are."""
    x, stride = _head(place, i, heads, rows, width)
    for first in range(0, width, BROAD):
        to = first * rows
        for t in range(rows):
            if first + BROAD <= width:
                for lane in range(0, BROAD, LANES):
                    copy(x, t * stride + first + lane, panels, to + t * BROAD + lane)
                continue
            for c in range(BROAD):
                seen = first + c < width
                panels[to + t * BROAD + c] = x[t * stride + first + c] if seen else np.float32(0)


@reordered()
def _turn(place: _Whole, i: int, heads: int, rows: int, width: int, panels: _Floats) -> None:
    """The same of the transposed head."""
    x, stride = _head(place, i, heads, rows, width)
    for first in range(0, rows, BROAD):
        to = first * width
        for c in range(0, BROAD, SIDE):
            row = first + c
            squares = width - width % SIDE if row + SIDE <= rows else 0
            for j in range(0, squares, SIDE):
                turn(x, row * stride + j, stride, panels, to + j * BROAD + c, BROAD)
            for j in range(squares, width):
                for r in range(SIDE):
                    seen = row + r < rows
                    value = x[(row + r) * stride + j] if seen else np.float32(0)
                    panels[to + j * BROAD + c + r] = value


@reordered()
def _multiply(
    left: _Floats,
    step: int,
    pitch: int,
    rows: int,
    panels: _Floats,
    count: int,
    columns: int,
    out: _Floats,
    stride: int,
) -> None:
    """out[r·stride + c] = Σ_s left[s·step + r·pitch] · right_sc, with right_sc in panels."""
    for first in range(0, columns, BROAD):
        for r in range(0, rows, TALL):
            matrix(
                left, r * pitch, step, pitch, panels, first * count, count,
                out, r * stride + first, stride,
            )  # fmt: skip


@reordered()
def _hide(x: _Floats, seen: int, causal: bool) -> None:
    """Have nothing come of what a place doesn't see, nor of columns beyond."""
    if causal or seen < x.shape[1]:
        for t in range(len(x)):
            for u in range(min(t + 1, seen) if causal else seen, x.shape[1]):
                x[t, u] = -np.inf


@_intrinsic
def _slopes(typing: Any, p: Any, slopes: Any, at: Any, count: Any, factor: Any) -> Any:
    """slopes_j = factor·p_j·(slopes_j − Σ_k p_k slopes_k), from place `at` on in both."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        p, slopes, at, count, factor = args

        def places(j: Any) -> tuple[Any, Lanes, Lanes]:
            here = builder.add(at, j)
            starts = [address(context, builder, SINGLES, x, here) for x in (p, slopes)]
            return starts[1], *(loaded(builder, start, LANES) for start in starts)

        def add(j: Any, total: Lanes) -> Lanes:
            _, share, slope = places(j)
            return share.fused(slope, total)

        def replace(j: Any, mean: Lanes) -> Lanes:
            start, share, slope = places(j)
            (spread(builder, factor, LANES) * share * (slope - mean)).store(start)
            return mean

        nothing = spread(builder, factor, LANES).filled(0.0)
        mean = spread(builder, folded(builder, count, LANES, nothing, add).sum(), LANES)
        folded(builder, count, LANES, mean, replace)
        return context.get_dummy_value()

    return types.void(SINGLES, SINGLES, types.int64, types.int64, types.float32), generate
