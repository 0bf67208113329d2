"""Sums of outer products by a compiled loop, in host memory: what every example's weight receives.

A tile of the result is summed in registers, squared there and written once. Compilers don't keep
so many sums in registers by themselves, so the innermost loop is given to them as vectors.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import prange, types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray
from torch import Tensor

from epsilons.training.compiled import reordered, share_out

MOST_PLACES = 128  # one chain of sums in single precision errs by less than 1e-5

_LANES = 8
_VECTORS = 2
_ROWS, _COLUMNS = 6, _VECTORS * _LANES  # of a tile: as many sums as there are registers

_Floats = NDArray[Any]
_ARRAY = types.Array(types.float32, 1, "C")
_intrinsic: Any = intrinsic  # numba itself gives the first argument
_FLOAT, _WHOLE, _PLACE = ir.FloatType(), ir.IntType(64), ir.IntType(32)
_VECTOR = ir.VectorType(_FLOAT, _LANES)
_FUSED = ("contract",)  # a product and the sum it goes into may be rounded once


def outer_sums(a: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Σ_t g_t a_tᵀ (B, p, d), their squared norms (B,) and Σ_t g_t (B, p).

    a: (B, T, d) and g: (B, T, p) in single precision, T ≥ 1.
    """
    (n, _, d), p = a.shape, g.shape[2]
    formed, squares, totals = a.new_empty(n, p, d), a.new_empty(n), a.new_empty(n, p)
    ours, theirs = (t.detach().contiguous().numpy() for t in (a, g))
    results = formed.numpy(), squares.numpy(), totals.numpy()
    share_out(n, _some, _at_once, ours, theirs, *results)
    return formed, squares, totals


@reordered(parallel=True)
def _at_once(
    threads: int, a: _Floats, g: _Floats, formed: _Floats, squares: _Floats, totals: _Floats
) -> None:
    n = len(a)
    for t in prange(threads):
        _some(t * n // threads, (t + 1) * n // threads, a, g, formed, squares, totals)


@reordered()
def _some(
    first: int,
    last: int,
    a: _Floats,
    g: _Floats,
    formed: _Floats,
    squares: _Floats,
    totals: _Floats,
) -> None:
    places, width, height = a.shape[1], a.shape[2], g.shape[2]
    panels = -(-width // _COLUMNS)
    left = np.zeros(places * _ROWS + _LANES, a.dtype)
    right = np.zeros(panels * places * _COLUMNS, a.dtype)
    edge = np.empty(_ROWS * _COLUMNS, a.dtype)
    flat = formed.reshape(-1)
    for i in range(first, last):
        _add_up(g[i], totals[i])
        for panel in range(panels):
            _pack_columns(a[i], panel * _COLUMNS, right[panel * places * _COLUMNS :])
        square = 0.0
        for row in range(0, height, _ROWS):
            _pack_rows(g[i], row, left)
            for panel in range(panels):
                column, begin = panel * _COLUMNS, panel * places * _COLUMNS
                if row + _ROWS <= height and column + _COLUMNS <= width:
                    at = (i * height + row) * width + column
                    square += _tile(left, right, begin, places, flat, at, width)
                    continue
                square += _tile(left, right, begin, places, edge, 0, _COLUMNS)
                for r in range(min(_ROWS, height - row)):
                    for c in range(min(_COLUMNS, width - column)):
                        formed[i, row + r, column + c] = edge[r * _COLUMNS + c]
        squares[i] = square


@reordered()
def _add_up(rows: _Floats, total: _Floats) -> None:
    total[:] = 0
    for t in range(rows.shape[0]):
        for j in range(rows.shape[1]):
            total[j] += rows[t, j]


@reordered()
def _pack_columns(x: _Floats, first: int, packed: _Floats) -> None:
    """Some columns of every place side by side; what isn't there has stayed zero."""
    places, width = x.shape
    flat = x.reshape(-1)
    for t in range(places):
        if first + _COLUMNS <= width:
            for v in range(_VECTORS):
                _copy(flat, t * width + first + v * _LANES, packed, t * _COLUMNS + v * _LANES)
        else:
            for c in range(width - first):
                packed[t * _COLUMNS + c] = x[t, first + c]


@reordered()
def _pack_rows(x: _Floats, first: int, packed: _Floats) -> None:
    """The same for fewer columns than a vector has: the next place overwrites what is too much."""
    places, width = x.shape
    flat = x.reshape(-1)
    for t in range(places):
        if first + _LANES <= width:
            _copy(flat, t * width + first, packed, t * _ROWS)
        else:
            for r in range(_ROWS):
                packed[t * _ROWS + r] = x[t, first + r] if first + r < width else x.dtype.type(0)


@_intrinsic
def _copy(typing: Any, x: Any, start: Any, to: Any, at: Any) -> Any:
    """One vector from x[start:] to to[at:]."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        value = _load(builder, _address(context, builder, *args[:2]))
        _store(builder, value, _address(context, builder, *args[2:]))
        return context.get_dummy_value()

    return types.void(_ARRAY, types.int64, _ARRAY, types.int64), generate


@_intrinsic
def _tile(
    typing: Any, left: Any, right: Any, begin: Any, places: Any, out: Any, at: Any, stride: Any
) -> Any:
    """out[at + r·stride + c] = Σ_t left[t, r] right[t, c], right from `begin`; Σ_rc of squares.

    There is one place at least.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        rows, columns, offset, count, target, first, width = args
        x = _address(context, builder, rows, _whole(0))
        y = _address(context, builder, columns, offset)
        to = _address(context, builder, target, first)
        zero = ir.Constant(_VECTOR, [0.0] * _LANES)
        before, loop = builder.block, builder.append_basic_block("places")
        after = builder.append_basic_block("sums")
        builder.branch(loop)

        builder.position_at_end(loop)
        t = builder.phi(_WHOLE)
        sums = [[builder.phi(_VECTOR) for _ in range(_VECTORS)] for _ in range(_ROWS)]
        ys = [
            _load(builder, _stepped(builder, y, t, _COLUMNS, v * _LANES)) for v in range(_VECTORS)
        ]
        totals = []
        for r, row in enumerate(sums):
            factor = _spread(builder, builder.load(_stepped(builder, x, t, _ROWS, r)))
            products = [builder.fmul(factor, vector, flags=_FUSED) for vector in ys]
            pairs = zip(row, products, strict=True)
            totals.append([builder.fadd(s, product, flags=_FUSED) for s, product in pairs])
        for row, total in zip(sums, totals, strict=True):
            for s, value in zip(row, total, strict=True):
                s.add_incoming(zero, before)
                s.add_incoming(value, loop)
        following = builder.add(t, _whole(1))
        t.add_incoming(_whole(0), before)
        t.add_incoming(following, loop)
        builder.cbranch(builder.icmp_signed("<", following, count), loop, after)

        builder.position_at_end(after)
        squares = zero
        for r, total in enumerate(totals):
            for v, value in enumerate(total):
                _store(builder, value, _stepped(builder, to, width, r, v * _LANES))
                square = builder.fmul(value, value, flags=_FUSED)
                squares = builder.fadd(squares, square, flags=_FUSED)
        return _across(builder, squares)

    whole = types.int64
    return types.float32(_ARRAY, _ARRAY, whole, whole, _ARRAY, whole, whole), generate


def _whole(value: int) -> Any:
    return ir.Constant(_WHOLE, value)


def _address(context: Any, builder: Any, array: Any, at: Any) -> Any:
    proxy = cgutils.create_struct_proxy(_ARRAY)  # type: ignore[no-untyped-call]
    return builder.gep(proxy(context, builder, array).data, [at])


def _stepped(builder: Any, address: Any, count: Any, step: int, rest: int) -> Any:
    """The address of entry count·step + rest."""
    return builder.gep(address, [builder.add(builder.mul(count, _whole(step)), _whole(rest))])


def _load(builder: Any, address: Any) -> Any:
    vector = builder.load(builder.bitcast(address, _VECTOR.as_pointer()))
    vector.align = 4
    return vector


def _store(builder: Any, vector: Any, address: Any) -> None:
    builder.store(vector, builder.bitcast(address, _VECTOR.as_pointer())).align = 4


def _spread(builder: Any, number: Any) -> Any:
    """A vector of the same number."""
    nothing = ir.Constant(_VECTOR, ir.Undefined)
    vector = builder.insert_element(nothing, number, ir.Constant(_PLACE, 0))
    everywhere = ir.Constant(ir.VectorType(_PLACE, _LANES), [0] * _LANES)
    return builder.shuffle_vector(vector, nothing, everywhere)


def _across(builder: Any, vector: Any) -> Any:
    """The sum of a vector's numbers."""
    total = builder.extract_element(vector, ir.Constant(_PLACE, 0))
    for lane in range(1, _LANES):
        number = builder.extract_element(vector, ir.Constant(_PLACE, lane))
        total = builder.fadd(total, number, flags=("reassoc",))
    return total
